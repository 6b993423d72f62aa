"""A prefill and a decode replica against two that do both: the same cores, the same requests, one machine.

    python benchmarks/disaggregated.py MODEL.gguf [--prompt 512] [--rounds 7] [--out 120]

Two heads run in turn, each with two replicas of one thread on this host. First the time to the first token of single
prompts: `together` computes them where they are decoded, `apart` in the other replica. Then streams that decode while a
long prompt arrives each second: the gaps between their tokens. Medians with ranges.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path

from cluster.config import ClusterConfig, DeploymentConfig, NetworkConfig
from cluster.gateway import GenerateRequest
from cluster.head import Head
from launcher.agent import local_agent_command
from sonar.config import CacheConfig, EngineConfig, SchedulerConfig
from sonar.sampling_params import SamplingParams
from tests.integration.head_main import plain_app

NUM_STREAMS = 4
NUM_LONG = 8
MAX_TOKEN = 30_000


async def first_token_s(head: Head, name: str, prompt: list[int]) -> float:
    """Seconds to the first token of a prompt alone."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0, seed=1, ignore_eos=True)
    begin = time.perf_counter()
    async for _ in head.services.gateway.generate(GenerateRequest(name, "m", prompt, sampling)):
        took = time.perf_counter() - begin
        break
    return took


async def gaps_s(head: Head, name: str, prompt: list[int], num_out: int) -> list[float]:
    """Seconds between a stream's tokens."""
    sampling = SamplingParams(max_tokens=num_out, temperature=0.0, seed=1, ignore_eos=True)
    seen: list[float] = []
    async for _ in head.services.gateway.generate(GenerateRequest(name, "m", prompt, sampling)):
        seen.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(seen)]


async def measure(
    model: str, prefill: int, num_prompt: int, rounds: int, num_out: int
) -> tuple[list[float], list[float]]:
    """Times to first tokens, and gaps under mixed load."""
    engine = EngineConfig(
        model=model,
        device="cpu",
        threads=1,
        kv_transfer="shm",
        cache=CacheConfig(memory_bytes=1 << 30),
        scheduler=SchedulerConfig(max_model_len=2048, max_num_requests=32),
    )
    deployment = DeploymentConfig("m", engine, replicas=2, prefill_replicas=prefill)
    rng = random.Random(prefill)

    def text(length: int) -> list[int]:
        return [rng.randrange(MAX_TOKEN) for _ in range(length)]

    with tempfile.TemporaryDirectory() as folder:
        config = ClusterConfig(Path(folder), (deployment,), NetworkConfig(http_port=0, control_port=0))
        head = Head(config, plain_app, agent_command=local_agent_command())
        task = asyncio.create_task(head.run())
        while len(head.control.table.routes()) < 2:
            await asyncio.sleep(0.05)
        await first_token_s(head, "warm", text(num_prompt))
        firsts = [await first_token_s(head, f"f{i}", text(num_prompt)) for i in range(rounds)]
        streams = [asyncio.create_task(gaps_s(head, f"s{i}", text(16), num_out)) for i in range(NUM_STREAMS)]
        await asyncio.sleep(0.5)
        for i in range(NUM_LONG):
            await first_token_s(head, f"l{i}", text(num_prompt))
        gaps = [gap for stream in await asyncio.gather(*streams) for gap in stream]
        head.request_stop()
        await task
    return firsts, gaps


def main() -> None:
    """Runs both, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=int, default=120)
    args = parser.parse_args()
    print("| | TTFT s, median | range | ITL p50 ms | ITL p99 ms |\n| --- | --- | --- | --- | --- |")
    for name, prefill in (("together", 0), ("apart", 1)):
        firsts, gaps = asyncio.run(measure(args.model, prefill, args.prompt, args.rounds, args.out))
        gaps.sort()
        p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
        print(
            f"| {name} | {statistics.median(firsts):.3f} | {min(firsts):.3f} to {max(firsts):.3f} "
            f"| {1000 * p50:.1f} | {1000 * p99:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
