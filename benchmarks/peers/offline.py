"""Sonar against llama.cpp in one run: the same GGUF file, the same threads, turn by turn, medians with ranges.

    pip install xllamacpp
    python benchmarks/peers/offline.py MODEL.gguf [--threads 2] [--rounds 5] [--activations int8]

Each engine lives in a process of its own and waits while the other works, so other load on the machine meets both.
Work: a prompt of 512 random tokens (tokens a second until the first token is out), then decoding 1 and 16 streams
(16-token prompts; the time for one token is taken off). llama.cpp runs its server core with 16 slots and no prompt
cache; Sonar its offline API without prefix cache. Prints the machine's ceilings first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

Generate = Callable[[list[list[int]], int], float]
"""(prompts, output tokens each) -> seconds."""
WORK = ("prompt of 512", "decode, 1 stream", "decode, 16 streams")
NUM_SLOTS = 16
MAX_TOKEN = 30_000


def open_sonar(model: str, threads: int, activations: str) -> Generate:
    """The offline API."""
    from sonar import LLM, SamplingParams

    llm = LLM(
        model,
        threads=threads,
        activations=activations,
        device="cpu",
        max_model_len=1024,
        max_num_requests=NUM_SLOTS,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], num_out: int) -> float:
        begin = time.perf_counter()
        sampling = SamplingParams(max_tokens=num_out, min_tokens=num_out, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(prompts, sampling)
        seconds = time.perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == num_out for output in outputs)
        return seconds

    return generate


def open_llama_cpp(model: str, threads: int, _: str) -> Generate:
    """llama.cpp's server core, without HTTP."""
    import xllamacpp  # type: ignore[import-not-found, unused-ignore]

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 1024 * NUM_SLOTS
    params.n_parallel = NUM_SLOTS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    server = xllamacpp.Server(params)
    callers = ThreadPoolExecutor(NUM_SLOTS)

    def complete(prompt: list[int], num_out: int) -> dict[str, Any]:
        answer = server.handle_completions(
            {"prompt": prompt, "n_predict": num_out, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        )
        return answer if isinstance(answer, dict) else json.loads(answer)

    def generate(prompts: list[list[int]], num_out: int) -> float:
        begin = time.perf_counter()
        answers = list(callers.map(lambda prompt: complete(prompt, num_out), prompts))
        seconds = time.perf_counter() - begin
        assert all(answer["timings"]["predicted_n"] == num_out for answer in answers), answers
        return seconds

    return generate


PEERS: dict[str, Callable[[str, int, str], Generate]] = {"llama.cpp": open_llama_cpp, "sonar": open_sonar}


def measure(generate: Generate, work: str, draw: random.Random) -> float:
    """Tokens a second."""

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[draw.randrange(100, MAX_TOKEN) for _ in range(length)] for _ in range(count)]

    if work == WORK[0]:
        return 512 / generate(prompts(1, 512), 1)
    count, num_out = (1, 96) if work == WORK[1] else (NUM_SLOTS, 48)
    first = generate(prompts(count, 16), 1)
    return count * (num_out - 1) / (generate(prompts(count, 16), num_out) - first)


def serve(link: Connection, peer: str, model: str, threads: int, activations: str) -> None:
    """A peer's process: answers each work asked for with its figure."""
    begin = time.perf_counter()
    generate = PEERS[peer](model, threads, activations)
    draw = random.Random(0)
    generate([[1, 2, 3, 4]], 2)
    link.send(time.perf_counter() - begin)
    while work := link.recv():
        link.send(measure(generate, work, draw))


def print_ceilings(threads: int) -> None:
    """What the machine can do now, by Sonar's own kernels."""
    from benchmarks.cpu.kernels import measure_ceilings
    from sonar.ops import _cpu, cpu

    cpu.set_num_threads(threads)
    ceilings = measure_ceilings(3)
    print(
        f"{_cpu.level()}, {threads} threads, load {os.getloadavg()[0]:.1f}: read {ceilings.read / 1e9:.1f} GB/s, "
        f"f32 {ceilings.float_ops / 1e9:.0f} GFLOP/s, integer {ceilings.integer_ops / 1e9:.0f} GOP/s",
        flush=True,
    )


def main() -> None:
    """Runs the peers in turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--activations", default="auto", choices=("auto", "float32", "int8"))
    arguments = parser.parse_args()
    print_ceilings(arguments.threads)
    spawn, links = multiprocessing.get_context("spawn"), {}
    for peer in PEERS:
        here, there = spawn.Pipe()
        settings = (there, peer, arguments.model, arguments.threads, arguments.activations)
        spawn.Process(target=serve, args=settings, daemon=True).start()
        links[peer] = here
        print(f"{peer}: ready in {here.recv():.1f} s", flush=True)
    figures: dict[tuple[str, str], list[float]] = {(peer, work): [] for peer in PEERS for work in WORK}
    for _ in range(arguments.rounds):
        for work in WORK:
            for peer, link in links.items():
                link.send(work)
                figures[peer, work].append(link.recv())
    for link in links.values():
        link.send("")
    print("| work | " + " | ".join(f"{peer}, tok/s" for peer in PEERS) + " | ratio |\n|" + " --- |" * (len(PEERS) + 2))
    for work in WORK:
        medians = {peer: statistics.median(figures[peer, work]) for peer in PEERS}
        ratios = [
            ours / theirs for ours, theirs in zip(figures["sonar", work], figures["llama.cpp", work], strict=True)
        ]
        cells = [
            f"{medians[peer]:.0f} ({min(figures[peer, work]):.0f}-{max(figures[peer, work]):.0f})" for peer in PEERS
        ]
        print(f"| {work} | {' | '.join(cells)} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    main()
