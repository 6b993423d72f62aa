"""What clients saw of a run under faults, and the model it is checked against: every accepted request ends, once, with
the output of the run without faults, and its events are numbered without gap or repeat.

Pure: knows no process and no socket. Filled by load.py, checked by the fault tests and by its own tests.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

Output = dict[str, Any]
"""Canonical: text, finish reason and logprobs of each choice, and usage; how tokens share events is left out."""

EventId = tuple[str, int]
"""The stream, and the event's number in it."""


@dataclass
class Record:
    """One request as its client saw it. Times: seconds of one monotonic clock.

    Attributes:
        is_durable: the client asked for an answer that outlives connections (resumable, or with a key).
        times_s: when its events came; of an answer that does not stream, when it came.
        ids: of the events, in the order they came; empty for a plain stream.
        refusals: answers 429 and 503 before it was accepted, after which the client tried again.
        connections: that it took.
    """

    variant: str
    sent_s: float
    is_durable: bool = False
    times_s: list[float] = field(default_factory=list)
    ids: list[EventId] = field(default_factory=list)
    refusals: int = 0
    connections: int = 0
    output: Output | None = None
    error: str = ""
    ended_s: float | None = None

    def longest_pause_s(self, begin_s: float, end_s: float) -> float:
        """The longest time between two things the client saw, of those times that touch begin_s..end_s."""
        last_s = self.ended_s if self.ended_s is not None else end_s
        marks = [self.sent_s, *self.times_s, last_s]
        spans = [b - a for a, b in itertools.pairwise(marks) if b >= begin_s and a <= end_s]
        return max(spans, default=0.0)

    def is_open(self, at_s: float) -> bool:
        """Whether it had been sent and had not ended."""
        return self.sent_s <= at_s and (self.ended_s is None or self.ended_s > at_s)


def faults_of(record: Record, expected: Output) -> list[str]:
    """Everything about one request that breaks the promise; empty if it was kept."""
    name = f"{record.variant} sent at {record.sent_s:.2f}"
    if record.ended_s is None:
        return [f"{name} never ended; it saw {len(record.times_s)} events"]
    if record.error:
        return [f"{name} ended with {record.error}"]
    found = []
    if record.output != expected:
        found.append(f"{name} differs: {_difference(record.output, expected)}")
    if len({stream for stream, _ in record.ids}) > 1:
        found.append(f"{name} was begun as several streams: {sorted({stream for stream, _ in record.ids})}")
    numbers = [number for _, number in record.ids]
    if numbers != list(range(1, len(numbers) + 1)):
        wrong = next(i for i, number in enumerate(numbers) if number != i + 1)
        found.append(f"{name}: event {wrong + 1} has number {numbers[wrong]}")
    return found


def check(records: list[Record], expected: dict[str, Output]) -> None:
    """Raises `AssertionError` that names every broken request."""
    broken = [fault for record in records for fault in faults_of(record, expected[record.variant])]
    assert not broken, "\n".join(broken[:20])


@dataclass(frozen=True)
class Owner:
    """Who computes a rank at a moment, as the head says."""

    at_s: float
    replica: str
    incarnation: int
    pids: tuple[int, ...]


def check_owners(owners: list[Owner]) -> None:
    """Raises `AssertionError` unless a replica's incarnations only rise and no process belongs to two of them."""
    last: dict[str, int] = {}
    owner_of: dict[int, tuple[str, int]] = {}
    for owner in sorted(owners, key=lambda o: o.at_s):
        assert owner.incarnation >= last.get(owner.replica, 0), f"{owner} after incarnation {last[owner.replica]}"
        last[owner.replica] = owner.incarnation
        for pid in owner.pids:
            whose = owner_of.setdefault(pid, (owner.replica, owner.incarnation))
            assert whose == (owner.replica, owner.incarnation), f"process {pid} is of {whose} and of {owner}"


def _difference(got: Output | None, expected: Output) -> str:
    if got is None:
        return "no output"
    for key in expected:
        if got.get(key) != expected[key]:
            return f"{key}: {got.get(key)!r:.300} for {expected[key]!r:.300}"
    return f"more than expected: {sorted(set(got) - set(expected))}"
