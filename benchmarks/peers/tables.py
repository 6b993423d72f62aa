"""Figures of peers that worked in turns, as a table for RESULTS.md. Pure; called by the scripts of this folder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

OURS, THEIRS = "sonar", "llama.cpp"


def spread(values: Sequence[float]) -> str:
    """Median and range, e.g. "163 (162-177)"; three digits are enough of such figures."""
    return f"{_short(statistics.median(values))} ({_short(min(values))}-{_short(max(values))})"


def table(figures: Mapping[str, Mapping[str, Sequence[float]]], limits: Mapping[str, float] | None = None) -> str:
    """A row for each quantity: the peers' medians with ranges, and the median of the rounds' ratios.

    Args:
        figures: quantity -> peer -> a figure a round; the same peers in each. The ratio is ours to theirs of one round.
        limits: of some quantities what the machine allows; a column says which share of it our median is.
    """
    peers = list(next(iter(figures.values())))
    header = ["work", *peers, f"{OURS} / {THEIRS}", *(["of the machine's limit"] if limits else [])]
    rows = [header, ["---"] * len(header)]
    for quantity, of_peer in figures.items():
        ratios = [ours / theirs for ours, theirs in zip(of_peer[OURS], of_peer[THEIRS], strict=True)]
        row = [quantity, *(spread(of_peer[peer]) for peer in peers), f"{statistics.median(ratios):.2f}"]
        if limits:
            limit = limits.get(quantity)
            row.append(f"{statistics.median(of_peer[OURS]) / limit:.0%} of {limit:.0f}" if limit else "-")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
