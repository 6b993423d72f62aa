"""The workloads that vLLM was measured by on the same card: whole engine, dummy weights, greedy, stop ids ignored.

    python -m benchmarks.gpu.workloads qwen3-0.6b decode_b1 decode_b8 mix_256

Prints a row for each: ours, vLLM's, their ratio, and the share of the card's own limit (bytes over copy bandwidth, or
operations over matrix rate, whichever is longer; see `limit_s`). vLLM: 0.26.0 on one H200 with torch 2.11.0+cu130, its
own defaults, full CUDA graphs, one run of each on 2026-11-30.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.ceilings import Ceilings, measure
from sonar.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from sonar.engine import BuiltEngine, build_engine
from sonar.messages import Submit
from sonar.sampling_params import SamplingParams

_CONFIGS = Path(__file__).parent / "configs"
DECODE_BATCHES = (1, 8, 32, 128, 256)

# Milliseconds a token for decode_*, output tokens a second for the others, prompt tokens a second for prefill_*.
VLLM: dict[str, dict[str, float]] = {
    "qwen3-0.6b": {
        "decode_b1": 1.741,
        "decode_b8": 2.435,
        "decode_b32": 2.886,
        "decode_b128": 4.228,
        "decode_b256": 5.211,
        "throughput_512_128": 28722,
        "throughput_1024_1024": 19994,
        "mix_256": 23924,
        "prefill_32x4096": 357638,
        "shared_prefix": 19142,
    },
    "llama-3.1-8b": {
        "decode_b1": 4.903,
        "decode_b8": 5.026,
        "decode_b32": 5.434,
        "decode_b128": 7.235,
        "decode_b256": 10.999,
        "throughput_512_128": 7153,
        "throughput_1024_1024": 9372,
        "mix_256": 9844,
        "prefill_32x4096": 41463,
        "shared_prefix": 7361,
    },
}


class Work(NamedTuple):
    """Requests given to the engine at once. prompts: token ids. outputs: tokens out of each."""

    prompts: list[list[int]]
    outputs: list[int]
    temperature: float = 0.0


class Figure(NamedTuple):
    """One measured row. seconds: of the whole work. value: in the unit of `VLLM`."""

    name: str
    value: float
    seconds: float
    least_s: float


def make_work(name: str, vocab_size: int, seed: int) -> Work:
    """The requests of a workload; decode_bN gives those of its longer run."""
    draw = random.Random(seed)

    def ids(count: int, top: int = vocab_size - 1) -> list[int]:
        return [draw.randint(0, top) for _ in range(count)]

    if name.startswith("decode_b"):
        count = int(name.removeprefix("decode_b"))
        return Work([ids(128) for _ in range(count)], [256] * count)
    if name.startswith("throughput_"):
        num_in, num_out = (int(part) for part in name.split("_")[1:])
        return Work([ids(num_in) for _ in range(512)], [num_out] * 512)
    if name == "mix_256":
        draw = random.Random(0)
        prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
        return Work(prompts, [draw.randint(100, 1024) for _ in range(256)], 0.6)
    if name == "prefill_32x4096":
        return Work([ids(4096) for _ in range(32)], [1] * 32)
    if name == "shared_prefix":
        shared = [ids(960) for _ in range(64)]
        return Work([[*shared[i % 64], *ids(64)] for i in range(512)], [64] * 512)
    raise ValueError(f"no workload {name!r}")


def run(built: BuiltEngine, work: Work, name: str) -> float:
    """Seconds from the first submission to the last token."""
    engine = built.engine
    began = time.perf_counter()
    for i, (prompt, num_out) in enumerate(zip(work.prompts, work.outputs)):
        sampling = SamplingParams(max_tokens=num_out, ignore_eos=True, temperature=work.temperature, seed=i)
        engine.add(Submit(incarnation=0, request_id=f"{name}-{i}", prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def measure_work(built: BuiltEngine, name: str, ceilings: Ceilings) -> Figure:
    """Runs a workload once, after a short run of its shape."""
    vocab_size = built.model_config.vocab_size
    work = make_work(name, vocab_size, seed=1)
    warm = make_work(name, vocab_size, seed=2)
    if name.startswith("decode_b"):
        count = len(work.prompts)
        run(built, Work(warm.prompts, [8] * count), f"{name}-warm")
        first_s = min(run(built, Work(make_work(name, vocab_size, seed).prompts, [1] * count), f"{name}-{seed}")
                      for seed in (3, 4))  # fmt: skip
        whole_s = run(built, work, name)
        least_s = limit_s(built, ceilings, decodes=count, seq_len=128 + 128)
        return Figure(name, 1e3 * (whole_s - first_s) / 255, whole_s, 1e3 * least_s)
    run(built, Work(warm.prompts[:64], [2] * 64, work.temperature), f"{name}-warm")
    if name == "mix_256":  # the warm-up's prompts are the work's own
        work = Work([[token + 1 for token in prompt] for prompt in work.prompts], work.outputs, work.temperature)
    seconds = run(built, work, name)
    tokens = sum(map(len, work.prompts)) if name.startswith("prefill") else sum(work.outputs)
    return Figure(name, tokens / seconds, seconds, 0.0)


def parameters(model: ModelConfig) -> tuple[int, int]:
    """Numbers in the layers' matrices, and in the head."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * (heads + 3 * model.intermediate_size)
    return layer * model.num_layers, model.hidden_size * model.vocab_size


def limit_s(built: BuiltEngine, ceilings: Ceilings, *, decodes: int, seq_len: int) -> float:
    """Least seconds of a decode step: weights and cache read once, or the products at full rate."""
    model = built.model_config
    numbers = sum(parameters(model))
    cached = 2 * model.num_kv_heads * model.head_dim * model.num_layers * seq_len * decodes
    return max(2 * (numbers + cached) / ceilings.copy_bytes_s, 2 * numbers * decodes / ceilings.bf16_flop_s)


def build(model: str, prefix_caching: bool, max_requests: int, step_tokens: int) -> BuiltEngine:
    """The engine as it is measured."""
    config = EngineConfig(
        model=str(_CONFIGS / model),
        load_format="dummy",
        device="cuda",
        cache=CacheConfig(enable_prefix_caching=prefix_caching, memory_share=0.92),
        scheduler=SchedulerConfig(max_num_requests=max_requests, max_step_tokens=step_tokens, max_model_len=8192),
    )
    return build_engine(config, lambda phase, done, total: None)


def show(model: str, figure: Figure) -> str:
    """A row of the table; above 1 the ratio says that ours is faster."""
    theirs = VLLM[model][figure.name]
    is_time = figure.name.startswith("decode")
    ratio = theirs / figure.value if is_time else figure.value / theirs
    share = f"{figure.least_s / figure.value:.0%} of the limit" if figure.least_s else ""
    unit = "ms/token" if is_time else "tokens/s"
    return (
        f"{model:14} {figure.name:22} {figure.value:10.3f} {unit:9} vLLM {theirs:10.3f}  {ratio:5.2f}x  "
        f"{figure.seconds:6.2f} s  {share}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line names; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(VLLM))
    parser.add_argument("works", nargs="*")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--max-requests", type=int, default=512)
    parser.add_argument("--step-tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    began = time.perf_counter()
    built = build(options.model, options.prefix_caching, options.max_requests, options.step_tokens)
    ceilings = measure()
    print(
        f"{options.model} ready in {time.perf_counter() - began:.1f} s, ops {built.ops_backend}, {ceilings}", flush=True
    )
    figures = []
    for name in options.works or VLLM[options.model]:
        before = (built.engine.times.schedule_s, built.engine.times.wait_s)
        figures.append(measure_work(built, name, ceilings))
        after = (built.engine.times.schedule_s, built.engine.times.wait_s)
        host = f"  host {after[0] - before[0]:.2f} s, wait {after[1] - before[1]:.2f} s"
        print(show(options.model, figures[-1]) + host, flush=True)
    built.engine.close()
    if options.json:
        options.json.write_text(json.dumps([figure._asdict() for figure in figures], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
