"""`sonar bench offline` and `latency`: the engine in this process, without server, text or sockets.

Offline: all requests at once, how many tokens a second. Latency: one batch at a time, how long from its submission to
its last token. Prompts are random token ids; end-of-sequence is ignored, so that the amount of work is known.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher.bench.datasets import LOWEST_ID, DatasetConfig, DatasetKind, Prompt, make_prompts
from launcher.bench.report import Run, table, write_json
from launcher.bench.stats import RequestRecord, Spread, Summary, summarize
from sonar.config import EngineConfig
from sonar.engine import BuiltEngine, Engine, build_engine
from sonar.errors import ConfigError
from sonar.messages import FinishReason, Submit, TokenEvent
from sonar.sampling_params import SamplingParams


@dataclass(frozen=True)
class OfflineBenchConfig:
    """One measurement.

    Attributes:
        dataset: RANDOM or SHARED_PREFIX; its vocabulary is replaced by the model's.
        num_prompts: requests a run. num_iterations: runs, each with prompts of its own; num_warmup more come before.
        temperature: 0 is greedy.
    """

    engine: EngineConfig
    dataset: DatasetConfig
    num_prompts: int
    num_iterations: int = 1
    num_warmup: int = 1
    temperature: float = 0.0
    json_path: str = ""

    def __post_init__(self) -> None:
        for name, low in (("num_prompts", 1), ("num_iterations", 1), ("num_warmup", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)}; must be at least {low}", param=name)
        if self.dataset.kind not in (DatasetKind.RANDOM, DatasetKind.SHARED_PREFIX):
            raise ConfigError("offline prompts are token ids: use --dataset random or shared-prefix", param="dataset")


def run_offline_bench(config: OfflineBenchConfig) -> int:
    """Measures throughput, prints it, writes the JSON asked for. Returns 0."""
    built = load(config.engine)
    try:
        runs = [
            Run(f"run {i + 1}" if config.num_iterations > 1 else "offline", describe(config, built), summary)
            for i, (summary, _) in enumerate(_iterate(config, built))
        ]
    finally:
        built.engine.close()
    print(table(runs))
    if config.json_path:
        write_json(config.json_path, "offline", runs)
    return 0


def run_latency_bench(config: OfflineBenchConfig) -> int:
    """Measures the time of whole batches, prints its spread, writes the JSON asked for. Returns 0."""
    built = load(config.engine)
    try:
        measured = list(_iterate(config, built))
    finally:
        built.engine.close()
    figures = latency_figures(measured, config.dataset.output_len)
    print(f"batch of {config.num_prompts}, {config.dataset.input_len} tokens in, {config.dataset.output_len} out")
    for name, spread in figures.items():
        print(
            f"  {name:<24} p50 {spread.p50:9.2f}  p90 {spread.p90:9.2f}  p99 {spread.p99:9.2f}  min {spread.min:9.2f}"
        )
    if config.json_path:
        write_json(config.json_path, "latency", {"settings": describe(config, built), "figures": figures})
    return 0


def latency_figures(measured: Sequence[tuple[Summary, float]], output_len: int) -> dict[str, Spread]:
    """Per figure its spread over the iterations, in ms: the whole batch, its prefill, and one decode step."""
    whole = [1e3 * duration_s for _, duration_s in measured]
    prefill = [summary.ttft_ms.max for summary, _ in measured if summary.ttft_ms]
    figures = {"batch, ms": Spread.of(whole), "first tokens, ms": Spread.of(prefill)}
    if output_len > 1:
        steps = [(total - first) / (output_len - 1) for total, first in zip(whole, prefill, strict=True)]
        figures["decode step, ms"] = Spread.of(steps)
    return {name: spread for name, spread in figures.items() if spread is not None}


def load(config: EngineConfig) -> BuiltEngine:
    """The engine, with its phases and settings on stderr."""
    shown = ""

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal shown
        if phase != shown:
            shown = phase
            print(f"  {phase}", file=sys.stderr, flush=True)

    built = build_engine(config, progress)
    for row in built.settings:
        print(f"  {row.name} = {row.value} ({row.reason})", file=sys.stderr)
    return built


def describe(config: OfflineBenchConfig, built: BuiltEngine) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "model": built.source.name,
        "device": built.config.device,
        "dtype": built.config.dtype,
        "threads": built.config.threads,
        "ops_backend": built.ops_backend,
        "num_prompts": config.num_prompts,
        "dataset": asdict(config.dataset) | {"kind": config.dataset.kind.value},
    }


def _iterate(config: OfflineBenchConfig, built: BuiltEngine) -> list[tuple[Summary, float]]:
    """Summary and duration in s of each measured iteration."""
    vocab_size = max(built.model_config.vocab_size, LOWEST_ID + 1)
    dataset = replace(config.dataset, vocab_size=vocab_size)
    iterations = config.num_warmup + config.num_iterations
    prompts = make_prompts(dataset, iterations * config.num_prompts)
    measured = []
    for i in range(iterations):
        batch = prompts[i * config.num_prompts : (i + 1) * config.num_prompts]
        begin_s = time.perf_counter()
        records = run_batch(built.engine, batch, f"bench-{i}", config.temperature)
        duration_s = time.perf_counter() - begin_s
        if i >= config.num_warmup:
            measured.append((summarize(records, duration_s), duration_s))
    return measured


def run_batch(engine: Engine, prompts: Sequence[Prompt], name: str, temperature: float) -> list[RequestRecord]:
    """All prompts at once, to their last token.

    Raises:
        UserError, CapacityError: a prompt does not fit the model or the queue.
    """
    records: dict[str, RequestRecord] = {}
    for i, prompt in enumerate(prompts):
        assert isinstance(prompt.content, list)
        request_id = f"{name}-{i}"
        sampling = SamplingParams(max_tokens=prompt.output_len, ignore_eos=True, temperature=temperature, seed=i)
        records[request_id] = RequestRecord(time.perf_counter(), prompt_tokens=len(prompt.content))
        engine.add(Submit(incarnation=0, request_id=request_id, prompt_token_ids=prompt.content, sampling=sampling))
    while engine.has_work:
        events = engine.step()
        now_s = time.perf_counter()
        for event in events:
            _take(records[event.request_id], event, now_s)
    return list(records.values())


def _take(record: RequestRecord, event: TokenEvent, now_s: float) -> None:
    if event.token_ids:
        record.event_times_s.append(now_s)
        record.output_tokens += len(event.token_ids)
    if event.num_cached_tokens >= 0:
        record.cached_tokens = event.num_cached_tokens
    if event.finish is not None:
        record.end_s = now_s
        if event.finish is FinishReason.ERROR:
            record.error = event.error
