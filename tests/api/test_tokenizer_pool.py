"""Tokenizers are loaded once, and long inputs leave the event loop alone."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from cluster.api import tokenizers
from cluster.api.settings import ApiSettings
from cluster.api.tokenizers import TokenizerPool
from sonar.errors import CapacityError
from tests.api.fakes import byte_tokenizer

SETTINGS = ApiSettings(inline_chars=10, tokenizer_threads=1)


async def test_many_callers_load_once_and_one_that_gives_up_spoils_nothing() -> None:
    loads = []

    def load(path: str):
        loads.append(path)
        time.sleep(0.02)
        return byte_tokenizer()

    pool = TokenizerPool(load, SETTINGS)
    callers = [asyncio.create_task(pool.get("/m")) for _ in range(5)]
    await asyncio.sleep(0.005)
    callers[0].cancel()
    got = await asyncio.gather(*callers[1:])
    assert loads == ["/m"]
    assert all(tokenizer is got[0] for tokenizer in got)
    assert await pool.get("/m") is got[0]


async def test_a_failed_load_is_tried_again() -> None:
    results = [OSError("busy"), byte_tokenizer()]

    def load(path: str):
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    pool = TokenizerPool(load, SETTINGS)
    with pytest.raises(OSError, match="busy"):
        await pool.get("/m")
    assert (await pool.get("/m")).vocab_size == 258


@pytest.mark.parametrize("num_chars,is_here", [(0, True), (10, True), (11, False)])
async def test_long_inputs_go_to_a_thread(num_chars: int, is_here: bool) -> None:
    pool = TokenizerPool(lambda path: byte_tokenizer(), SETTINGS)
    ident = await pool.run(num_chars, threading.get_ident)
    assert (ident == threading.get_ident()) == is_here


async def test_the_loop_goes_on_while_a_long_input_is_worked_on() -> None:
    pool = TokenizerPool(lambda path: byte_tokenizer(), SETTINGS)
    release = threading.Event()
    work = asyncio.create_task(pool.run(11, lambda: release.wait(5)))
    await asyncio.sleep(0.01)
    assert not work.done()
    release.set()
    assert await work


async def test_waiting_inputs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "MAX_IN_THREADS", 2)
    pool = TokenizerPool(lambda path: byte_tokenizer(), SETTINGS)
    release = threading.Event()
    waiting = [asyncio.create_task(pool.run(11, lambda: release.wait(5))) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(CapacityError):
        await pool.run(11, lambda: None)
    release.set()
    await asyncio.gather(*waiting)
    assert await pool.run(11, lambda: 3) == 3
