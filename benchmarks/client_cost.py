"""What the load client of `sonar bench serve` costs: CPU time per streamed event against a server that only writes.

    python benchmarks/client_cost.py [streams ...]

A figure of a server is worth something only while the client's own share of a core stays small; this gives the rate
at which it would not. The server, a process of its own, writes prepared events, one a `write`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import sys
import time

from launcher.bench.datasets import DatasetConfig, make_prompts
from launcher.bench.load import Target, run_closed
from launcher.client.http_stream import Endpoint

EVENTS_PER_REQUEST = 200
REQUESTS_PER_STREAM = 4
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'  # noqa: E501 - one event as servers send it
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":200,"total_tokens":208}}\n\n'


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Writes EVENTS_PER_REQUEST events to one client."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEAD)
    for _ in range(EVENTS_PER_REQUEST):
        writer.write(chunk(EVENT))
        await writer.drain()
        await asyncio.sleep(0)  # the streams take turns, as an engine's do
    writer.write(chunk(USAGE) + chunk(b"data: [DONE]\n\n") + chunk(b""))
    await writer.drain()
    writer.close()


def serve(listener: socket.socket) -> None:
    """The server process's main."""

    async def run() -> None:
        server = await asyncio.start_server(answer, sock=listener)
        await server.serve_forever()

    asyncio.run(run())


def main() -> None:
    """Prints one line a number of streams."""
    counts = [int(text) for text in sys.argv[1:]] or [1, 8, 32, 128]
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(listener,), daemon=True)
    server.start()
    target = Target(Endpoint.of(url, "/v1/completions", None), "m", False, 60.0, {})
    for streams in counts:
        prompts = make_prompts(DatasetConfig(input_len=32), streams * REQUESTS_PER_STREAM)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        records = asyncio.run(run_closed(target, prompts, streams))
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        events = sum(len(record.event_times_s) for record in records)
        assert events == len(prompts) * EVENTS_PER_REQUEST, [r.error for r in records if r.error]
        print(
            f"{streams:4d} streams: {1e6 * cpu_s / events:6.1f} us of CPU an event, "
            f"{events / wall_s:8.0f} events/s, client at {cpu_s / wall_s:.0%} of a core"
        )
    server.terminate()
    server.join()


if __name__ == "__main__":
    main()
