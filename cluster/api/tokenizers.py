"""Tokenizers of the served models: loaded once each, and kept off the event loop when the input is long.

Owns the loaded tokenizers and the threads. Knows no request fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cluster.api.settings import ApiSettings
from sonar.errors import CapacityError
from sonar.model_source import resolve_model
from sonar.tokenizer import Tokenizer, load_tokenizer

R = TypeVar("R")

# Long inputs in the threads or waiting for one; the next is refused.
MAX_IN_THREADS = 256


def tokenizer_loader(cache_dir: Path) -> Callable[[str], Tokenizer]:
    """A `load` for `TokenizerPool` that reads a model's own files. cache_dir: for derived ones."""
    return lambda path: load_tokenizer(resolve_model(path, cache_dir=cache_dir))


class TokenizerPool:
    """Tokenizers by path.

    Args:
        load: reads the tokenizer of a model's folder or file; slow, called in a thread.
    """

    def __init__(self, load: Callable[[str], Tokenizer], settings: ApiSettings) -> None:
        self._load = load
        self._inline_chars = settings.inline_chars
        self._threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        self._loaded: dict[str, Tokenizer] = {}
        self._num_in_threads = 0
        self._loading: dict[str, asyncio.Future[Tokenizer]] = {}

    async def get(self, path: str) -> Tokenizer:
        """The tokenizer of a model; loads it when it is first asked for, once however many ask.

        Raises:
            Whatever `load` raises; the next call tries again.
        """
        tokenizer = self._loaded.get(path)
        if tokenizer is not None:
            return tokenizer
        loading = self._loading.get(path)
        if loading is None:
            loading = asyncio.get_running_loop().run_in_executor(self._threads, self._load_whole, path)
            self._loading[path] = loading
        try:
            # Shielded: one caller that gives up must not take the load away from the others.
            tokenizer = await asyncio.shield(loading)
        finally:
            if loading.done():
                self._loading.pop(path, None)
        self._loaded[path] = tokenizer
        return tokenizer

    def _load_whole(self, path: str) -> Tokenizer:
        """Loads with what is made at first use, which would take its time on the event loop."""
        tokenizer = self._load(path)
        _ = tokenizer.length_bound
        return tokenizer

    async def run(self, num_chars: int, work: Callable[[], R]) -> R:
        """Do tokenizer work: here when the input is short, in a thread when it is long.

        Raises:
            CapacityError: too many long inputs wait.
        """
        if num_chars <= self._inline_chars:
            return work()
        if self._num_in_threads >= MAX_IN_THREADS:
            raise CapacityError(f"{MAX_IN_THREADS} long inputs wait for the tokenizer; try again later")
        self._num_in_threads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_in_threads -= 1

    def close(self) -> None:
        """Let the threads go; work in progress is finished, waiting work is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
