"""The figures of a simulation, and their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.sim.meter import Meter


class MemorySample(NamedTuple):
    """Resident memory of the whole process (head and fakes) at a simulated moment."""

    at_s: float
    rss_bytes: int


@dataclass(frozen=True)
class PhaseReport:
    """One phase. simulated_s: its length; wall_s: what it took, fakes included. num_nodes: hosts at its end."""

    name: str
    simulated_s: float
    wall_s: float
    meter: Meter

    def lines(self) -> list[str]:
        """For people."""
        head_s = self.meter.head_cpu_s
        lines = [
            f"{self.name}: {self.simulated_s:.1f} s simulated in {self.wall_s:.1f} s; head {head_s:.2f} s of CPU, "
            f"{100 * head_s / max(1e-9, self.simulated_s):.1f}% of a core"
        ]
        for kind, cost in sorted(self.meter.costs.items(), key=lambda item: -item[1].cpu_ns):
            lines.append(
                f"  {kind:<18} {cost.count:>9} x {cost.mean_us:>8.1f} us = {cost.cpu_ns / 1e9:>7.2f} s"
                f"   worst {cost.worst_ns / 1e6:.1f} ms"
            )
        return lines


@dataclass(frozen=True)
class SimReport:
    """A whole simulation.

    Attributes:
        converged_s: simulated, from the begin of the joining to every replica ready.
        errors: texts of requests that ended so. migrations: attempts that broke off and were begun again.
        checks: how often the whole was looked at.
    """

    num_nodes: int
    num_devices: int
    num_replicas: int
    converged_s: float
    phases: tuple[PhaseReport, ...]
    faults: Counter[str]
    accepted: int
    refused: int
    finished: Counter[str]
    errors: Counter[str]
    num_tokens: int
    migrations: int
    memory: tuple[MemorySample, ...]
    checks: int

    def text(self) -> str:
        """For people."""
        lines = [
            f"{self.num_nodes} nodes x {self.num_devices} devices, {self.num_replicas} replicas",
            f"converged {self.converged_s:.2f} s (simulated) after the first join",
        ]
        for phase in self.phases:
            lines += phase.lines()
            beat, decisions = phase.meter.costs.get("Heartbeat"), phase.meter.costs.get("request")
            if beat:
                lines.append(f"  heartbeats: 1,000 a second take {beat.mean_us / 10:.1f}% of a core")
            if decisions:
                lines.append(
                    f"  accept and route: {1e6 / decisions.mean_us:,.0f}/s, p50 {phase.meter.decision_us(0.5):.0f} us, "
                    f"p99 {phase.meter.decision_us(0.99):.0f} us"
                )
        lines.append(f"faults: {dict(self.faults)}")
        lines.append(
            f"requests: {self.accepted} accepted, {self.refused} refused, ended {dict(self.finished)}, "
            f"{self.num_tokens} tokens, {self.migrations} attempts begun again"
        )
        lines += [f"  {count} x {text}" for text, count in self.errors.most_common(5)]
        if len(self.memory) > 2:
            half = self.memory[len(self.memory) // 2 :]
            first, last = (sample.rss_bytes >> 20 for sample in (self.memory[0], self.memory[-1]))
            lines.append(
                f"memory: {first} MiB at first, {last} MiB at last; "
                f"slope of the second half {slope_bytes_per_s(half) * 3600 / 2**20:.1f} MiB an hour"
            )
        lines.append(f"invariants held at {self.checks} checks of the whole, and at every spawn and token")
        return "\n".join(lines)


def slope_bytes_per_s(samples: Sequence[MemorySample]) -> float:
    """Least-squares slope over simulated time."""
    mean_s = sum(sample.at_s for sample in samples) / len(samples)
    mean_bytes = sum(sample.rss_bytes for sample in samples) / len(samples)
    spread = sum((sample.at_s - mean_s) ** 2 for sample in samples)
    return sum((s.at_s - mean_s) * (s.rss_bytes - mean_bytes) for s in samples) / spread if spread else 0.0
