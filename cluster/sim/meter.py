"""What the head's code costs in a simulation: processor time by message kind, and time of single routing decisions.

Measures the calling thread's processor time, so that a machine that is shared with other work counts for less.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_SAMPLES = 100_000


@dataclass
class Cost:
    """Of one kind of call. cpu_ns: in all of them; worst_ns: of the dearest."""

    count: int = 0
    cpu_ns: int = 0
    worst_ns: int = 0

    @property
    def mean_us(self) -> float:
        """Of one call."""
        return self.cpu_ns / 1000 / max(1, self.count)


class Meter:
    """Owner of one phase's figures. samples_ns: of routing decisions, at most MAX_SAMPLES, evenly drawn."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}
        self.samples_ns: list[int] = []
        self._num_decisions = 0
        self._random = random.Random(0)

    @property
    def head_cpu_s(self) -> float:
        """All of the head's work."""
        return sum(cost.cpu_ns for cost in self.costs.values()) / 1e9

    def add(self, kind: str, cpu_ns: int) -> None:
        """One call is over."""
        cost = self.costs.setdefault(kind, Cost())
        cost.count += 1
        cost.cpu_ns += cpu_ns
        cost.worst_ns = max(cost.worst_ns, cpu_ns)

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Counts what runs inside as one call of that kind."""
        began_ns = time.thread_time_ns()
        try:
            yield
        finally:
            self.add(kind, time.thread_time_ns() - began_ns)

    def add_decision(self, cpu_ns: int) -> None:
        """One request was accepted and routed."""
        self.add("request", cpu_ns)
        self._num_decisions += 1
        if len(self.samples_ns) < MAX_SAMPLES:
            self.samples_ns.append(cpu_ns)
        elif (place := self._random.randrange(self._num_decisions)) < MAX_SAMPLES:
            self.samples_ns[place] = cpu_ns

    def decision_us(self, share: float) -> float:
        """A quantile of the decisions' times; 0 when there were none."""
        ordered = sorted(self.samples_ns)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1000 if ordered else 0.0
