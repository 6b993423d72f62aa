"""`sonar bench serve`: a sweep of load over HTTP against any OpenAI-compatible server.

Wires data set, arrivals, client, statistics and report together; each of those is in its own file.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.bench.arrivals import Arrival, arrival_times
from launcher.bench.datasets import DatasetConfig, DatasetKind, Prompt, make_prompts
from launcher.bench.load import Target, run_closed, run_open, send
from launcher.bench.plot import Series, require_matplotlib, write_plot
from launcher.bench.report import Run, table, write_json
from launcher.bench.stats import RequestRecord, itl_samples_ms, summarize, ttft_samples_ms
from launcher.client.http_stream import Endpoint
from sonar.errors import ConfigError, SonarError


@dataclass(frozen=True)
class ServeBenchConfig:
    """A sweep over loads.

    Attributes:
        concurrencies: closed loops to run one after the other, by default one client; with rates, one value: the most
            requests under way.
        rates: open loops to run, requests/s; empty for closed loops.
        num_requests: per run; 0: eight times the concurrency, at least 16.
        num_warmup: requests sent and forgotten before the first run, with prompts of their own.
        extra: fields added to each request's body.
    """

    url: str
    model: str
    dataset: DatasetConfig
    chat: bool = False
    api_key: str | None = None
    concurrencies: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    arrival: Arrival = Arrival.POISSON
    num_requests: int = 0
    num_warmup: int = 2
    timeout_s: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)
    json_path: str = ""
    plot_path: str = ""

    def __post_init__(self) -> None:
        if any(value < 1 for value in self.concurrencies) or any(value <= 0 for value in self.rates):
            raise ConfigError("--concurrency must be at least 1 and --rate above 0", param="concurrency")
        if self.rates and len(self.concurrencies) > 1:
            raise ConfigError("give several --rate or several --concurrency, not both", param="rate")
        if self.chat and self.dataset.kind not in (DatasetKind.WORDS, DatasetKind.FILE):
            raise ConfigError("--chat sends text: use --dataset words or file", param="dataset")


@dataclass(frozen=True)
class _Load:
    """One run of the sweep. rate None: closed loop."""

    rate: float | None
    concurrency: int | None
    num_requests: int

    @property
    def label(self) -> str:
        return f"{self.concurrency} streams" if self.rate is None else f"{self.rate:g} req/s"


def run_serve_bench(config: ServeBenchConfig) -> int:
    """Measures, prints, writes the files asked for. Returns 0, or 1 when a request failed."""
    if config.plot_path:
        require_matplotlib()
    runs, series = asyncio.run(_sweep(config))
    print(table(runs))
    if config.json_path:
        write_json(config.json_path, "serve", runs)
    if config.plot_path:
        write_plot(config.plot_path, f"{config.model}, {config.dataset.kind.value}", series)
    return 1 if any(run.summary.failed for run in runs) else 0


async def _sweep(config: ServeBenchConfig) -> tuple[list[Run], list[Series]]:
    path = "/v1/chat/completions" if config.chat else "/v1/completions"
    endpoint = Endpoint.of(config.url, path, config.api_key)
    target = Target(endpoint, config.model, config.chat, config.timeout_s, config.extra)
    loads = _loads(config)
    # One draw for the whole sweep: a later run must not find its prompts in the cache of an earlier one.
    prompts = make_prompts(config.dataset, config.num_warmup + sum(load.num_requests for load in loads))
    await _warm_up(target, prompts[: config.num_warmup])
    used = config.num_warmup
    runs, series = [], []
    for load in loads:
        _progress(f"{load.label}: {load.num_requests} requests")
        records, duration_s, cpu = await _measure(
            _start(target, prompts[used : used + load.num_requests], load, config), load.num_requests
        )
        used += load.num_requests
        settings = {"load": asdict(load), "dataset": asdict(config.dataset) | {"kind": config.dataset.kind.value}}
        summary = summarize(records, duration_s)
        runs.append(Run(load.label, {**settings, "model": config.model, "client_cpu_share": round(cpu, 4)}, summary))
        series.append(
            Series(load.label, ttft_samples_ms(records), itl_samples_ms(records), summary.output_tokens_per_s)
        )
    return runs, series


def _loads(config: ServeBenchConfig) -> list[_Load]:
    if config.rates:
        cap = config.concurrencies[0] if config.concurrencies else None
        return [_Load(rate, cap, config.num_requests or max(16, round(10 * rate))) for rate in config.rates]
    return [_Load(None, value, config.num_requests or max(16, 8 * value)) for value in config.concurrencies or (1,)]


def _start(
    target: Target, prompts: Sequence[Prompt], load: _Load, config: ServeBenchConfig
) -> Coroutine[Any, Any, list[RequestRecord]]:
    if load.rate is None:
        return run_closed(target, prompts, load.concurrency or 1)
    times_s = arrival_times(len(prompts), load.rate, config.arrival, config.dataset.seed)
    return run_open(target, prompts, times_s, load.concurrency)


async def _measure(
    running: Coroutine[Any, Any, list[RequestRecord]], num_requests: int
) -> tuple[list[RequestRecord], float, float]:
    """Records, duration in s, and the share of one core that this client used meanwhile."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    records = await running
    duration_s = time.perf_counter() - begin_s
    assert len(records) == num_requests, (len(records), num_requests)
    return records, duration_s, (time.process_time() - begin_cpu_s) / duration_s


async def _warm_up(target: Target, prompts: Sequence[Prompt]) -> None:
    """Raises `SonarError` with the server's words when not even a first request is answered."""
    for prompt in prompts:
        record = await send(target, prompt)
        if record.error:
            raise SonarError(f"the server at {target.endpoint.host}:{target.endpoint.port}: {record.error}")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
