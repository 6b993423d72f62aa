"""Sonar against llama.cpp in one run: the same GGUF file, the same threads, turn by turn, medians with ranges.

    pip install xllamacpp
    python -m benchmarks.peers.offline MODEL.gguf [--threads 2] [--rounds 5] [--activations int8] [--transformers]

Each engine lives in a process of its own and waits while the other works, so other load on the machine meets both.
Work: a prompt of 512 random tokens (tokens a second until the first token is out), then decoding 1 and 16 streams
(16-token prompts; the time for one token is taken off). llama.cpp runs its server core with 16 slots and no prompt
cache; Sonar its offline API without prefix cache; transformers, when asked for, `generate` in float32. Prints what the
machine can do, and which share of what that allows Sonar reached.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.cpu.kernels import Ceilings, measure_ceilings
from benchmarks.peers.limits import read_cost
from benchmarks.peers.tables import OURS, THEIRS, table
from sonar.ops import _cpu, cpu

Generate = Callable[[list[list[int]], int], float]
"""(prompts, output tokens each) -> seconds."""
WORK = ("prompt of 512", "decode, 1 stream", "decode, 16 streams")
PROMPT_LEN = 512
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


def open_transformers(model: str, threads: int, _: str) -> Generate:
    """transformers' `generate`, greedy, in float32 with random weights: the file gives the shapes alone."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM, Qwen2ForCausalLM

    torch.set_num_threads(threads)
    path = Path(model)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    family = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}[config.model_type]
    loaded = family(config).float()
    loaded.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], num_out: int) -> float:
        begin = time.perf_counter()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = loaded.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_out,
                min_new_tokens=num_out,
                do_sample=False,
            )
        assert out.shape[1] == ids.shape[1] + num_out, out.shape
        return time.perf_counter() - begin

    return generate


PEERS: dict[str, Callable[[str, int, str], Generate]] = {
    OURS: open_sonar,
    THEIRS: open_llama_cpp,
    "transformers": open_transformers,
}


def measure(generate: Generate, work: str, draw: random.Random) -> float:
    """Tokens a second."""

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[draw.randrange(100, MAX_TOKEN) for _ in range(length)] for _ in range(count)]

    if work == WORK[0]:
        return PROMPT_LEN / generate(prompts(1, PROMPT_LEN), 1)
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


def print_ceilings(threads: int) -> Ceilings:
    """What the machine can do now, by Sonar's own kernels."""
    cpu.set_num_threads(threads)
    ceilings = measure_ceilings(3)
    print(
        f"{_cpu.level()}, {threads} threads, load {os.getloadavg()[0]:.1f}: read {ceilings.read / 1e9:.1f} GB/s from "
        f"huge pages, {ceilings.read_small_pages / 1e9:.1f} from small, f32 {ceilings.float_ops / 1e9:.0f} GFLOP/s, "
        f"integer {ceilings.integer_ops / 1e9:.0f} GOP/s",
        flush=True,
    )
    return ceilings


def main() -> None:
    """Runs the peers in turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--activations", default="auto", choices=("auto", "float32", "int8"))
    parser.add_argument("--transformers", action="store_true", help="a third peer")
    arguments = parser.parse_args()
    ceilings, cost = print_ceilings(arguments.threads), read_cost(Path(arguments.model))
    limits = {
        WORK[0]: cost.prompt(ceilings, PROMPT_LEN),
        WORK[1]: cost.decode(ceilings, 1),
        WORK[2]: cost.decode(ceilings, NUM_SLOTS),
    }
    spawn, links = multiprocessing.get_context("spawn"), {}
    for peer in PEERS if arguments.transformers else (OURS, THEIRS):
        here, there = spawn.Pipe()
        settings = (there, peer, arguments.model, arguments.threads, arguments.activations)
        spawn.Process(target=serve, args=settings, daemon=True).start()
        links[peer] = here
        print(f"{peer}: ready in {here.recv():.1f} s", flush=True)
    figures: dict[str, dict[str, list[float]]] = {work: {peer: [] for peer in links} for work in WORK}
    for _ in range(arguments.rounds):
        for work in WORK:
            for peer, link in links.items():
                link.send(work)
                figures[work][peer].append(link.recv())
    for link in links.values():
        link.send("")
    print(f"\ntokens/s, {arguments.rounds} rounds\n\n{table(figures, limits)}")


if __name__ == "__main__":
    main()
