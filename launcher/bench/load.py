"""Sends a run's requests to an OpenAI-compatible server and records what came back, open loop or closed.

Open loop: requests start at given times whatever the server does, and a late start counts as waiting (no coordinated
omission). Closed loop: `concurrency` clients, each sending its next request when the last one has ended. Knows nothing
of statistics or printing. Called by `launcher.bench.serve`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from launcher.bench.datasets import Prompt
from launcher.bench.stats import RequestRecord
from launcher.client.events import DONE, decode_event
from launcher.client.http_stream import Endpoint, post_stream


@dataclass(frozen=True)
class Target:
    """What each request says besides its prompt.

    Attributes:
        chat: /v1/chat/completions with one user message (text prompts only), else /v1/completions.
        extra: further fields of the body, e.g. {"temperature": 0, "ignore_eos": true}.
    """

    endpoint: Endpoint
    model: str
    chat: bool
    timeout_s: float
    extra: dict[str, Any]

    def body(self, prompt: Prompt) -> bytes:
        """The request's JSON."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        if self.chat:
            fields["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            fields["prompt"] = prompt.content
        return msgspec.json.encode(fields)


class _Recorder:
    """Turns one request's events into its record."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record

    def on_event(self, data: bytes) -> None:
        """Raises `ValueError` when the data is no event of the API."""
        now = time.perf_counter()
        if data == DONE:
            return
        event = decode_event(data)
        if event.error is not None:
            self.record.error = self.record.error or f"in stream: {event.error.message[:200]}"
        if any(choice.has_text for choice in event.choices):
            self.record.event_times_s.append(now)
        if event.usage is not None:
            self.record.prompt_tokens = event.usage.prompt_tokens
            self.record.output_tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            self.record.cached_tokens = (details.cached_tokens or 0) if details else 0


async def send(target: Target, prompt: Prompt, start_s: float | None = None) -> RequestRecord:
    """One request. start_s: when it was due (`time.perf_counter`), by default now."""
    record = RequestRecord(start_s=time.perf_counter() if start_s is None else start_s)
    recorder = _Recorder(record)
    error = await post_stream(target.endpoint, target.body(prompt), recorder.on_event, target.timeout_s)
    record.end_s = time.perf_counter()
    record.error = record.error or error
    if not record.error and not record.output_tokens:
        record.error = "the server sent no usage, or no token"
    return record


async def run_closed(target: Target, prompts: Sequence[Prompt], concurrency: int) -> list[RequestRecord]:
    """All prompts by `concurrency` clients in a closed loop; records in order of their end."""
    records: list[RequestRecord] = []
    queue = iter(prompts)

    async def client(queue: Iterator[Prompt]) -> None:
        for prompt in queue:
            records.append(await send(target, prompt))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(client(queue))
    return records


async def run_open(
    target: Target, prompts: Sequence[Prompt], times_s: Sequence[float], concurrency: int | None
) -> list[RequestRecord]:
    """Prompt i at times_s[i] after the begin. concurrency: most requests under way; a wait for a place is latency."""
    begin = time.perf_counter()
    places = asyncio.Semaphore(concurrency or len(prompts))

    async def request(prompt: Prompt, due_s: float) -> RequestRecord:
        async with places:
            return await send(target, prompt, due_s)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt, offset_s in zip(prompts, times_s, strict=True):
            due_s = begin + offset_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(request(prompt, due_s)))
    return [task.result() for task in tasks]
