"""Sonar's server against llama.cpp's over HTTP: all run at once, each works while the others wait, turn by turn.

    pip install xllamacpp
    python -m benchmarks.peers.server MODEL.gguf {cold,shared,busy} [--threads 2] [--rounds 3] [flags of `sonar serve`]

Streamed by the client of `sonar bench serve`, greedy, end of sequence ignored, new random prompts in each round:
  cold    4 clients with one request each: 512-token prompts that share nothing, 32 tokens out
  shared  16 clients, 48 requests of 672 shared and 63 own tokens, 64 out; a new prefix in each round
  busy    one client, 256-token prompts, 64 out, while a loop takes a CPU: servers of 1 thread and of --threads

Also prints the seconds from a server's start to its first streamed token (the first start of each fills the caches of
files and tokenizers and is not counted), and the most memory that its processes took together (PSS). Both keep 16
requests at once and have the same bytes for keys and values: SLOT_TOKENS a slot in llama.cpp's 16 bits.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace

from benchmarks.peers.processes import START_TIMEOUT_S, MemoryWatch, core_taken, find_free_port, running
from benchmarks.peers.tables import OURS, THEIRS, table
from launcher.bench.datasets import DatasetConfig, DatasetKind, Prompt, make_prompts
from launcher.bench.load import Target, run_closed, send
from launcher.bench.stats import Summary, summarize
from launcher.client.http_stream import Endpoint

NUM_SLOTS = 16
SLOT_TOKENS = 1024
# Of 16-bit keys and values of SmolLM2-135M for all slots (30 layers, 3 heads of 64); more than other demo files need.
CACHE_BYTES = NUM_SLOTS * SLOT_TOKENS * 2 * 30 * 3 * 64 * 2
SHARED = DatasetKind.SHARED_PREFIX


@dataclass(frozen=True)
class Load:
    """What one turn asks of a server."""

    num_clients: int
    num_requests: int
    prompts: DatasetConfig


LOADS = {
    "cold": Load(4, 4, DatasetConfig(input_len=512, output_len=32)),
    "shared": Load(16, 48, DatasetConfig(kind=SHARED, prefix_len=672, input_len=63, output_len=64)),
    "busy": Load(1, 2, DatasetConfig(input_len=256, output_len=64)),
}


@dataclass(frozen=True)
class Server:
    """A server that answers. start_s: to its first token."""

    peer: str
    threads: int
    target: Target
    start_s: float
    memory: MemoryWatch


def command(peer: str, model: str, port: int, threads: int, flags: Sequence[str]) -> list[str]:
    """Python's arguments that start a server."""
    if peer == THEIRS:
        return ["-m", "benchmarks.peers.llama_server", model, *map(str, (port, threads, NUM_SLOTS, SLOT_TOKENS))]
    sizes = ["--max-num-requests", str(NUM_SLOTS), "--kv-cache-memory", str(CACHE_BYTES)]
    serve = ["-m", "launcher.cli.main", "serve", model, "--served-model-name", "peer", "--port", str(port)]
    return [*serve, "--threads", str(threads), *sizes, *flags]


def start(stack: ExitStack, peer: str, model: str, threads: int, flags: Sequence[str]) -> Server:
    """Starts a server, which ends with the stack, and waits for its first token."""
    port = find_free_port()
    began = time.perf_counter()
    process = stack.enter_context(running(command(peer, model, port, threads, flags)))
    memory = MemoryWatch(process.pid)
    stack.callback(memory.stop)
    endpoint = Endpoint.of(f"http://127.0.0.1:{port}", "/v1/completions", None)
    target = Target(endpoint, "peer", False, 600.0, {"temperature": 0, "ignore_eos": True})
    wait_for_token(target, process)
    return Server(peer, threads, target, time.perf_counter() - began, memory)


def wait_for_token(target: Target, process: subprocess.Popen[bytes]) -> None:
    """Raises `RuntimeError` when the server ends or answers nothing in time."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        record = asyncio.run(send(target, Prompt([1, 2, 3, 4], 1)))
        if not record.error:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r}: {record.error}")
        time.sleep(0.02)


def measure(target: Target, load: Load, seed: int) -> Summary:
    """One turn. Raises `RuntimeError` when a request failed."""
    prompts = make_prompts(replace(load.prompts, seed=seed), load.num_requests)
    began = time.perf_counter()
    records = asyncio.run(run_closed(target, prompts, load.num_clients))
    summary = summarize(records, time.perf_counter() - began)
    if summary.failed:
        raise RuntimeError(f"{summary.failed} requests failed: {summary.errors}")
    return summary


def quantities(summary: Summary) -> dict[str, float]:
    """What is compared of a turn."""
    assert summary.ttft_ms and summary.itl_ms
    return {
        "output tokens/s": summary.output_tokens_per_s,
        "TTFT p50, s": summary.ttft_ms.p50 / 1e3,
        "TTFT p99, s": summary.ttft_ms.p99 / 1e3,
        "ITL p50, ms": summary.itl_ms.p50,
        "ITL p99, ms": summary.itl_ms.p99,
    }


def main() -> None:
    """Starts the servers, measures, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("work", choices=LOADS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    arguments, flags = parser.parse_known_args()
    is_busy = arguments.work == "busy"
    thread_counts = sorted({1, arguments.threads}) if is_busy else [arguments.threads]
    figures: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        servers = []
        for threads in thread_counts:
            for peer in (OURS, THEIRS):
                with ExitStack() as first:
                    start(first, peer, arguments.model, threads, flags)
                servers.append(start(stack, peer, arguments.model, threads, flags))
        taken = max(os.sched_getaffinity(0))
        for seed in range(1, arguments.rounds + 1):
            for server in servers:
                with core_taken(taken) if is_busy else nullcontext():
                    summary = measure(server.target, LOADS[arguments.work], seed)
                for name, value in quantities(summary).items():
                    row = f"{name}, {server.threads} threads" if is_busy else name
                    figures.setdefault(row, {}).setdefault(server.peer, []).append(value)
        for server in servers:
            suffix = f", {server.threads} threads" if is_busy else ""
            figures.setdefault(f"start to first token, s{suffix}", {})[server.peer] = [server.start_s]
            peak = server.memory.peak_bytes / 2**20
            figures.setdefault(f"peak memory, MiB{suffix}", {})[server.peer] = [peak]
    print(f"{arguments.work}: {LOADS[arguments.work]}, load {os.getloadavg()[0]:.1f}\n\n{table(figures)}", flush=True)


if __name__ == "__main__":
    main()
