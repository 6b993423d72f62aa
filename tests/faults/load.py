"""Traffic for the fault tests: many kinds of requests, streaming and not, greedy and seeded, short and long, each with
an output that does not depend on when it runs. Clients behave as docs/api.md tells them to.

Knows the HTTP API alone. Fills `history.Record`s.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.faults.history import Output, Record
from tests.integration.hosts import enter

Body = dict[str, Any]
GIVE_UP_S = 90.0  # a client's patience with one request
SILENCE_S = 6.0  # after it a client that can come back does
RETRY_S = 0.1
LONG_TOKENS = 1400

_SEEDED = {"temperature": 0.9, "seed": 11, "ignore_eos": True}
_GREEDY = {"temperature": 0.0, "ignore_eos": True}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_CHAT = {"messages": [{"role": "user", "content": "Tell me of the sea."}]}

SHORT: dict[str, tuple[str, Body]] = {
    "greedy stream": ("completions", {"prompt": "one two", **_GREEDY, **_USAGE, "max_tokens": 24}),
    "seeded stream, n 2, logprobs": (
        "completions",
        {"prompt": "a", **_SEEDED, **_USAGE, "max_tokens": 12, "n": 2, "logprobs": 2},
    ),
    "seeded chat stream": ("chat/completions", {**_CHAT, **_SEEDED, **_USAGE, "max_tokens": 20}),
    "greedy chat, penalties": ("chat/completions", {**_CHAT, **_GREEDY, "max_tokens": 20, "frequency_penalty": 0.7}),
    "seeded, n 2": ("completions", {"prompt": ["x", "why"], **_SEEDED, "max_tokens": 16, "n": 2}),
    "seeded, stop strings": ("completions", {"prompt": "stop", **_SEEDED, "max_tokens": 60, "stop": ["e", "q", "7"]}),
}
LONG: dict[str, tuple[str, Body]] = {
    "long seeded stream": ("completions", {"prompt": "long " * 40, **_SEEDED, **_USAGE, "max_tokens": LONG_TOKENS}),
    "long greedy stream, penalties": (
        "completions",
        {"prompt": "and " * 30, **_GREEDY, **_USAGE, "max_tokens": LONG_TOKENS, "repetition_penalty": 1.3},
    ),
    "long chat, not streamed": ("chat/completions", {**_CHAT, **_SEEDED, "seed": 12, "max_tokens": LONG_TOKENS // 2}),
}
VARIANTS = {**SHORT, **LONG}


def is_stream(variant: str) -> bool:
    """Whether its client sees tokens as they come."""
    return bool(VARIANTS[variant][1].get("stream"))


@dataclass
class Load:
    """Traffic in a thread of a host's namespace, from `begin` to `drain`.

    Attributes:
        urls: where clients connect, the next one after each failure.
        only_durable: no plain requests, as a client of a cluster whose head may die does.
        per_second: short requests; besides, `num_long` long ones are always under way.
    """

    namespace: str
    urls: list[str]
    model: str
    only_durable: bool = False
    per_second: float = 6.0
    num_long: int = 3
    records: list[Record] = field(default_factory=list)
    ready: list[tuple[float, bool]] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def begin(self) -> None:
        """Starts it."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def drain(self) -> None:
        """No new requests; waits until all have ended or their clients have given up."""
        self._is_over.set()
        assert self._thread is not None
        self._thread.join(2 * GIVE_UP_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def once(self) -> dict[str, Output]:
        """Every variant once, one after the other: what they give when nothing happens."""
        outputs: dict[str, Output] = {}

        async def each() -> None:
            async with self._client() as client:
                for variant in VARIANTS:
                    record = await self._request(client, variant, is_durable=False)
                    assert record.output is not None and not record.error, (variant, record.error)
                    outputs[variant] = record.output
            self.records.clear()

        self._in_namespace(lambda: asyncio.run(each()))
        return outputs

    def _in_namespace(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                enter(self.namespace)
                work()
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                self._error = error

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            enter(self.namespace)
            asyncio.run(self._all())
        except BaseException as error:  # noqa: BLE001 - raised by drain
            self._error = error

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        return httpx.AsyncClient(timeout=httpx.Timeout(GIVE_UP_S, connect=2.0), limits=limits, trust_env=False)

    async def _all(self) -> None:
        async with self._client() as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll_ready(client))
            for lane, variant in zip(range(self.num_long), itertools.cycle(LONG)):
                tasks.create_task(self._lane(client, variant, is_durable=self.only_durable or lane % 2 == 0))
            for number, variant in enumerate(itertools.cycle(SHORT)):
                if self._is_over.is_set():
                    return
                is_durable = self.only_durable or number // len(SHORT) % 2 == 0
                tasks.create_task(self._request(client, variant, is_durable=is_durable))
                await asyncio.sleep(1 / self.per_second)

    async def _lane(self, client: httpx.AsyncClient, variant: str, *, is_durable: bool) -> None:
        while not self._is_over.is_set():
            await self._request(client, variant, is_durable=is_durable)

    async def _poll_ready(self, client: httpx.AsyncClient) -> None:
        while not self._is_over.is_set():
            is_ready = False
            for url in self.urls:
                with contextlib.suppress(httpx.TransportError):
                    is_ready |= (await client.get(f"{url}/ready", timeout=8.0)).status_code == 200
            self.ready.append((time.monotonic(), is_ready))
            await asyncio.sleep(0.2)

    async def _request(self, client: httpx.AsyncClient, variant: str, *, is_durable: bool) -> Record:
        path, body = VARIANTS[variant]
        record = Record(variant, time.monotonic(), is_durable)
        self.records.append(record)
        reader = _Reader({**body, "model": self.model}, f"/v1/{path}", record)
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await self._until_it_ends(client, reader, record)
        except TimeoutError:
            record.error = f"nothing for its client within {GIVE_UP_S:.0f} s; {record.error}"
        record.ended_s = time.monotonic()
        return record

    async def _until_it_ends(self, client: httpx.AsyncClient, reader: _Reader, record: Record) -> None:
        key = uuid.uuid4().hex
        for url in itertools.cycle(self.urls):
            try:
                if await reader.read(client, url, key if record.is_durable else ""):
                    return
                record.refusals += 1
            except httpx.TransportError as error:
                # Before the first byte of a plain request a client does not know whether it was accepted: it was, as
                # far as this suite is concerned, once the connection stood.
                if not record.is_durable and not isinstance(error, httpx.ConnectError):
                    record.error = repr(error)
                    return
            await asyncio.sleep(RETRY_S)


@dataclass
class _Reader:
    """Reads one request over as many connections as it takes."""

    body: Body
    path: str
    record: Record
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: Any = None

    async def read(self, client: httpx.AsyncClient, url: str, key: str) -> bool:
        """One connection; False when the request was refused for now."""
        self.record.connections += 1
        headers = {"Idempotency-Key": key} if key else {}
        if self.record.ids:
            stream, number = self.record.ids[-1]
            headers["Last-Event-ID"] = f"{stream}:{number}"
        timeout = httpx.Timeout(SILENCE_S if key else GIVE_UP_S, connect=2.0)
        async with client.stream("POST", url + self.path, json=self.body, headers=headers, timeout=timeout) as answer:
            if answer.status_code in (429, 503):
                await answer.aread()
                return False
            if answer.status_code != 200:
                self.record.error = f"{answer.status_code} {(await answer.aread()).decode()[:300]}"
                return True
            if not self.body.get("stream"):
                self._take_whole(json.loads(await answer.aread()))
                return True
            rest = ""
            async for chunk in answer.aiter_text():
                *blocks, rest = (rest + chunk).split("\n\n")
                for block in blocks:
                    if self._take_event(block):
                        return True
        raise httpx.RemoteProtocolError("the stream ended without its end mark")

    def _take_event(self, block: str) -> bool:
        """True at the end."""
        found = re.fullmatch(r"(?:id: (.+):(\d+)\n)?data: (.*)", block)
        if not found:
            return False  # a comment that keeps the connection alive
        self.record.times_s.append(time.monotonic())
        if found[1]:
            self.record.ids.append((found[1], int(found[2])))
        if found[3] == "[DONE]":
            self.record.output = self._output()
            return True
        event = json.loads(found[3])
        if "error" in event:
            self.record.error = str(event["error"])[:300]
            return True
        self._take(event)
        return False

    def _take_whole(self, answer: Any) -> None:
        self.record.times_s.append(time.monotonic())
        self._take(answer)
        self.record.output = self._output()

    def _take(self, event: Any) -> None:
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            said = self.choices.setdefault(choice["index"], {"text": "", "end": None, "logprobs": []})
            words = choice.get("delta") or choice.get("message") or choice
            said["text"] += words.get("text") or words.get("content") or ""
            said["end"] = choice.get("finish_reason") or said["end"]
            if choice.get("logprobs"):
                said["logprobs"] += choice["logprobs"].get("token_logprobs", [])

    def _output(self) -> Output:
        usage = {k: self.usage[k] for k in ("prompt_tokens", "completion_tokens")} if self.usage else None
        return {**{str(index): said for index, said in sorted(self.choices.items())}, "usage": usage}
