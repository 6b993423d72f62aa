"""A simulation from empty to drained: hosts join, replicas load, requests come, things break, everything ends.

Wires the real `ControlPlane` (state, request table, router, codecs, an on-disk store) to the fakes. Called by
`sonar sim` and tests.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from cluster.config import ClusterConfig, DeploymentConfig, RestartPolicy, Timeouts
from cluster.control import ControlPlane
from cluster.events import DeploymentApplied
from cluster.sim.agent import LoadTimes
from cluster.sim.checks import check_processes, check_records, is_converged, is_settled
from cluster.sim.churn import Churn
from cluster.sim.link import SimLink
from cluster.sim.meter import Meter
from cluster.sim.report import MemorySample, PhaseReport, SimReport
from cluster.sim.timeline import Timeline
from cluster.sim.traffic import Traffic
from cluster.store.sqlite import SqliteStore
from cluster.versions import installed_versions
from sonar.config import EngineConfig, ParallelConfig
from sonar.errors import ConfigError

TICK_S = 0.25
READ_S = 0.1
CHECK_S = 5.0
MEMORY_S = 30.0
# Longer than anything that is begun before the end takes: a reboot, a load, a drain, the wait for a replica.
END_S = 900.0
CONVERGE_LIMIT_S = 600.0


@dataclass(frozen=True)
class SimConfig:
    """What to simulate.

    Attributes:
        tp_sizes: one deployment each, which together fill the devices in equal shares.
        join_s: over which the hosts join, in random order.
        steady_s, requests_per_s: load without faults. churn_s, churn_requests_per_s, faults_per_s: with them.
    """

    nodes: int = 1000
    devices: int = 8
    tp_sizes: tuple[int, ...] = (8, 2)
    join_s: float = 2.0
    load: LoadTimes = field(default_factory=lambda: LoadTimes(1.0, 4.0))
    steady_s: float = 20.0
    requests_per_s: float = 500.0
    churn_s: float = 60.0
    churn_requests_per_s: float = 20.0
    faults_per_s: float = 1.0
    heartbeat_s: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("nodes", 1, 100_000), ("devices", 1, 64)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name}={getattr(self, name)}; choose {low} to {high}", param=name)
        if not self.tp_sizes or any(not 1 <= size <= self.devices for size in self.tp_sizes):
            raise ConfigError(f"tp_sizes={self.tp_sizes}; give sizes of 1 to {self.devices} devices", param="tp_sizes")
        for name in ("join_s", "steady_s", "requests_per_s", "churn_s", "churn_requests_per_s", "faults_per_s"):
            if not 0 <= getattr(self, name) < 1e7:
                raise ConfigError(f"{name}={getattr(self, name)}; must be 0 or above", param=name)

    def deployments(self) -> list[DeploymentConfig]:
        """As many replicas as fill the devices."""
        total = self.nodes * self.devices
        configs = []
        for size in self.tp_sizes:
            engine = EngineConfig(model="sim", device="cuda", parallel=ParallelConfig(tp_size=size))
            count = max(1, total // len(self.tp_sizes) // size)
            configs.append(DeploymentConfig(f"tp{size}", engine, replicas=min(10_000, count)))
        return configs


class Simulation:
    """Owner of one simulated cluster. A breach of an invariant is an AssertionError.

    Args:
        state_dir: an empty folder for the head's store.
        say: told of each phase.
    """

    def __init__(self, config: SimConfig, state_dir: Path, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._random = Random(config.seed)
        self._timeline = Timeline()
        self._link = SimLink(self._timeline)
        self._store = SqliteStore(state_dir / "head.db")
        timeouts = Timeouts(
            heartbeat_interval_s=config.heartbeat_s, heartbeat_timeout_s=max(3.0, 4 * config.heartbeat_s)
        )
        cluster = ClusterConfig(state_dir, timeouts=timeouts, restart=RestartPolicy(stable_s=5.0))
        versions = installed_versions()
        self.control = ControlPlane(cluster, self._link, self._store, versions, self._timeline.clock)
        self.control.open()
        self._churn = Churn(self._link, self.control, config.devices, versions, config.load, self._random)
        names = [deployment.model for deployment in config.deployments()]
        self._traffic = Traffic(self._link, self.control.table, names, self._random)
        self._memory: list[MemorySample] = []
        self._num_checks = 0

    def run(self) -> SimReport:
        """Everything, once."""
        config = self._config
        self._plan_routine()
        converged_s = 0.0

        def converge() -> None:
            nonlocal converged_s
            self._join_all()
            converged_s = self._run_until_converged()

        phases = [self._phase("joining", converge)]
        self._say(f"converged after {converged_s:.2f} s")
        num_replicas = len(self.control.state.replicas)
        if config.steady_s:
            phases.append(self._phase("steady load", self._steady))
        if config.churn_s:
            phases.append(self._phase("churn", self._break_things))
        phases.append(self._phase("ending", self._end))
        table = self.control.table
        return SimReport(
            num_nodes=config.nodes,
            num_devices=config.devices,
            num_replicas=num_replicas,
            converged_s=converged_s,
            phases=tuple(phases),
            faults=self._churn.faults,
            accepted=self._traffic.accepted,
            refused=self._traffic.refused,
            finished=Counter({reason.value: count for reason, count in self._traffic.finished.items()}),
            errors=self._traffic.errors,
            num_tokens=self._traffic.num_tokens,
            migrations=table.counters.migrations,
            memory=tuple(self._memory),
            checks=self._num_checks,
        )

    def close(self) -> None:
        """Ends it; call this once."""
        self._store.close()

    def _plan_routine(self) -> None:
        """What happens all the time: the head's tick, clients that read, checks."""

        def tick() -> bool:
            with self._link.meter.measure("tick"):
                self.control.tick()
            if self.control.incarnations.is_near:
                self.control.incarnations.raise_ceiling()
            return True

        def read() -> bool:
            self._traffic.read_all()
            return True

        def check() -> bool:
            check_records(self.control)
            check_processes(self._churn.agents.values())
            self._num_checks += 1
            return True

        for interval_s, action in ((TICK_S, tick), (READ_S, read), (CHECK_S, check)):
            self._timeline.every(interval_s, action, interval_s)

    def _phase(self, name: str, work: Callable[[], None]) -> PhaseReport:
        meter = self._link.meter = Meter()
        began_s, began_wall_s = self._timeline.now_s, time.monotonic()
        work()
        report = PhaseReport(name, self._timeline.now_s - began_s, time.monotonic() - began_wall_s, meter)
        self._say(report.lines()[0])
        return report

    def _join_all(self) -> None:
        for deployment in self._config.deployments():
            with self._link.meter.measure("DeploymentApplied"):
                self.control.feed(DeploymentApplied(deployment))
        node_ids = [f"node-{index:05d}" for index in range(self._config.nodes)]
        self._random.shuffle(node_ids)
        for node_id in node_ids:
            delay_s = self._random.uniform(0, self._config.join_s)
            self._timeline.after(delay_s, lambda node_id=node_id: self._churn.join(node_id))  # type: ignore[misc]

    def _run_until_converged(self) -> float:
        while not is_converged(self.control):
            assert self._timeline.now_s < CONVERGE_LIMIT_S, f"not converged after {CONVERGE_LIMIT_S:.0f} s"
            self._timeline.run(0.05)
        return self._timeline.now_s

    def _steady(self) -> None:
        self._traffic.begin(self._config.requests_per_s)
        self._timeline.run(self._config.steady_s)

    def _break_things(self) -> None:
        config = self._config
        self._traffic.begin(config.churn_requests_per_s)
        if config.faults_per_s:
            self._churn.begin(config.faults_per_s)
        end_s = self._timeline.now_s + config.churn_s
        while self._timeline.now_s < end_s:
            self._timeline.run(min(MEMORY_S, end_s - self._timeline.now_s))
            gc.collect()
            self._memory.append(MemorySample(self._timeline.now_s, psutil.Process().memory_info().rss))
        self._churn.stop()

    def _end(self) -> None:
        """No new requests or faults: every open request ends, every replica comes back."""
        self._traffic.begin(0.0)
        limit_s = self._timeline.now_s + END_S
        while self._traffic.num_open or self.control.table.num_open:
            assert self._timeline.now_s < limit_s, f"{self._traffic.num_open} requests did not end"
            self._timeline.run(0.5)
        assert sum(self._traffic.finished.values()) == self._traffic.accepted
        while not is_settled(self.control):
            assert self._timeline.now_s < limit_s, "replicas did not come back"
            self._timeline.run(0.5)
