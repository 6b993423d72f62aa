"""The figures of a run of the fault suite, and the table they make in docs/reliability.md."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar

import pytest


@dataclass(frozen=True)
class Result:
    """One fault's figures.

    Attributes:
        num_requests: all, of which `num_hit` were open when it happened.
        pauses_s: of those, sorted: the longest time without anything new between the fault and the end of recovery.
        not_ready_s: how long `/ready` was not 200. whole_s: from the fault until everything served again.
        num_refused: answers 429 and 503, after which clients tried again.
    """

    KEY: ClassVar[pytest.StashKey[list[Result]]] = pytest.StashKey()

    name: str
    num_requests: int
    num_hit: int
    pauses_s: list[float]
    not_ready_s: float
    whole_s: float
    num_refused: int

    def row(self) -> str:
        """Of the table."""
        median, worst = statistics.median(self.pauses_s), self.pauses_s[-1]
        return (
            f"| {self.name} | {self.num_requests} | 0 | {self.num_hit} | {median:.1f} | {worst:.1f} "
            f"| {self.not_ready_s:.1f} | {self.whole_s:.1f} |"
        )


COLUMNS = (
    *("fault", "requests", "lost", "open then", "pause (s), median", "longest"),
    *("not ready (s)", "whole again after (s)"),
)


def table(results: list[Result]) -> str:
    """Markdown. "lost" is 0 in every row: a run with another figure has failed, and makes no row."""
    return "\n".join(
        [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}", *(result.row() for result in results)]
    )
