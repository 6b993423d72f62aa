"""What the HTTP API costs: CPU of one server process per streamed token and per short request, on loopback.

    python benchmarks/api_stream.py [--streams 64] [--tokens 600] [--step-ms 20] [--requests 500]

The gateway is a fake whose every step gives each open request one token, as an engine would; tokenizer, detokenizer,
metrics and server are the real ones. `floor` is a bare ASGI application that sends as many bytes as often: what is
above it is the API's own. Runs interleave and medians are printed, for the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers

from cluster.api.app import create_app
from cluster.api.settings import ApiSettings
from cluster.gateway import GenerateRequest, ServedModel
from sonar.messages import FinishReason, TokenEvent
from sonar.tokenizer import Tokenizer
from sonar.tokenizer.chat_template import ChatTemplates
from sonar.tokenizer.tokenizer import SpecialTokens

CHUNK_BYTES = 220  # what a chat chunk of one token takes


class SteppingGateway:
    """Gives every open request one token a step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._queues: dict[str, asyncio.Queue[TokenEvent]] = {}
        self._limits: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    async def run(self) -> None:
        """Step for ever."""
        while True:
            await asyncio.sleep(self._step_s)
            for request_id in list(self._queues):
                self._step(request_id)

    def _step(self, request_id: str) -> None:
        number = self._numbers[request_id]
        is_last = number + 1 == self._limits[request_id]
        finish = FinishReason.LENGTH if is_last else None
        self._numbers[request_id] += 1
        self._queues[request_id].put_nowait(
            TokenEvent(request_id=request_id, first=number, token_ids=[65 + number % 26], finish=finish)
        )
        if is_last:
            del self._queues[request_id]

    def models(self) -> list[ServedModel]:
        """One model."""
        return [ServedModel("fake", "/fake", 1_000_000, 0, True)]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Its tokens."""
        async for event in self.events(request.request_id, request.sampling.max_tokens or 1):
            yield event

    async def events(self, request_id: str, limit: int) -> AsyncIterator[TokenEvent]:
        """`limit` tokens under this id."""
        queue: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._queues[request_id], self._limits[request_id], self._numbers[request_id] = queue, limit, 0
        while True:
            event = await queue.get()
            yield event
            if event.finish is not None:
                return

    def abort(self, request_id: str, finish: FinishReason = FinishReason.ABORT) -> None:
        """No more tokens."""
        self._queues.pop(request_id, None)

    async def probe(self, model: str, timeout_s: float) -> bool:
        """Always works."""
        return True


def byte_tokenizer(path: str) -> Tokenizer:
    """One token a printable byte."""
    core = Core(models.BPE(vocab={chr(byte): byte for byte in range(0x21, 0x7F)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return Tokenizer(core, SpecialTokens({}), ChatTemplates({"default": template}, "fake"), "fake")


def floor_app(gateway: SteppingGateway) -> Callable[..., Awaitable[None]]:
    """The bare application."""
    count = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal count
        count += 1
        limit = json.loads((await receive())["body"])["max_tokens"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for _ in gateway.events(str(count), limit):
            await send({"type": "http.response.body", "body": b"x" * CHUNK_BYTES, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def serve(pipe: Connection, kind: str, step_s: float) -> None:
    """Server process; sends its port when it is up."""
    gateway = SteppingGateway(step_s)
    app: Any = floor_app(gateway)
    if kind == "api":
        app = create_app(gateway, ApiSettings(), registry=CollectorRegistry(), load_tokenizer=byte_tokenizer)
    lifespan: Any = "on" if kind == "api" else "off"
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", http="httptools", lifespan=lifespan)
    server = uvicorn.Server(config)

    async def main() -> None:
        serving, stepping = asyncio.create_task(server.serve()), asyncio.create_task(gateway.run())
        while not server.started:
            await asyncio.sleep(0.01)
        pipe.send(server.servers[0].sockets[0].getsockname()[1])
        await serving
        stepping.cancel()

    uvloop.run(main())


async def post(port: int, body: dict[str, Any]) -> int:
    """One request on a connection of its own; bytes of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    size = 0
    while data := await reader.read(65536):
        size += len(data)
    writer.close()
    return size


@dataclass(frozen=True)
class Server:
    """A running server process."""

    process: psutil.Process
    port: int

    def cpu_us(self, bodies: list[dict[str, Any]], width: int) -> float:
        """CPU the server spends on these requests, `width` at a time, in microseconds."""

        async def load() -> None:
            gate = asyncio.Semaphore(width)

            async def one(body: dict[str, Any]) -> None:
                async with gate:
                    assert await post(self.port, body) > 100

            await asyncio.gather(*map(one, bodies))

        before = self._cpu_s()
        asyncio.run(load())
        return (self._cpu_s() - before) * 1e6

    def _cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


def start(kind: str, step_s: float) -> Server:
    """Start a server; it dies with this process."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, kind, step_s), daemon=True)
    process.start()
    assert mine.poll(30), "the server did not start"
    return Server(psutil.Process(process.pid), mine.recv())


def body_of(max_tokens: int, *, stream: bool, n: int = 1) -> dict[str, Any]:
    """A chat request."""
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "fake", "messages": messages, "max_tokens": max_tokens, "stream": stream, "n": n}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=500, help="not streaming, one token each")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    servers = {kind: start(kind, options.step_ms / 1000) for kind in ("api", "floor")}
    for server in servers.values():
        server.cpu_us([body_of(20, stream=True)] * 4, 4)
    num_tokens = options.streams * options.tokens
    figures: dict[str, list[float]] = {"us_per_token": [], "floor_us_per_token": [], "n8_us_per_token": []}
    figures["us_per_request"] = []
    streams = [body_of(options.tokens, stream=True)] * options.streams
    choices = [body_of(options.tokens, stream=True, n=8)] * max(1, options.streams // 8)
    for _ in range(options.repeats):
        figures["us_per_token"].append(servers["api"].cpu_us(streams, options.streams) / num_tokens)
        figures["floor_us_per_token"].append(servers["floor"].cpu_us(streams, options.streams) / num_tokens)
        figures["n8_us_per_token"].append(
            servers["api"].cpu_us(choices, len(choices)) / (len(choices) * 8 * options.tokens)
        )
        short = [body_of(1, stream=False)] * options.requests
        figures["us_per_request"].append(servers["api"].cpu_us(short, 16) / options.requests)
    for name, values in figures.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name}: median {middle:.1f}, {low:.1f} to {high:.1f}")
    print(time.strftime("%Y-%m-%d"), json.dumps(vars(options)))


if __name__ == "__main__":
    main()
