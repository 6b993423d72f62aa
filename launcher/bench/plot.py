"""One picture of a sweep: how TTFT and ITL are spread, and throughput a run. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sonar.errors import ConfigError


@dataclass(frozen=True)
class Series:
    """One run as the picture needs it; latencies in ms."""

    label: str
    ttft_ms: list[float]
    itl_ms: list[float]
    output_tokens_per_s: float


def require_matplotlib() -> None:
    """Raises `ConfigError` with the remedy when pictures cannot be drawn; called before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib", param="plot") from error


def write_plot(path: str, title: str, series: Sequence[Series]) -> None:
    """Writes a picture (format by the file's ending). Raises `ConfigError` when it cannot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    ttft, itl, rate = figure.subplots(1, 3)
    for one in series:
        _distribution(ttft, one.ttft_ms, one.label)
        _distribution(itl, one.itl_ms, one.label)
    ttft.set(xlabel="TTFT, ms", ylabel="share of requests", title="time to first token")
    itl.set(xlabel="ITL, ms", ylabel="share of gaps", title="gap between stream events")
    rate.bar([one.label for one in series], [one.output_tokens_per_s for one in series])
    rate.set(ylabel="output tokens/s", ylim=(0, None), title="throughput")
    ttft.legend(loc="lower right")
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}", param="plot") from error


def _distribution(axes: Any, samples: Sequence[float], label: str) -> None:
    """Cumulative share over a logarithmic axis: tails are what matters."""
    if samples:
        ordered = sorted(samples)
        axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=label)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
