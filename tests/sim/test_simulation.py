"""The simulator: small clusters from empty to drained, its own honesty, and what an event costs in a large one."""

from __future__ import annotations

import sys

import pytest

from cluster.events import AgentReported, AgentSpoke, LeadSpoke
from cluster.messages import StartWorker, WorkerRef, WorkerStarted
from cluster.records import ReplicaState
from cluster.sim.agent import LoadTimes, SimAgent
from cluster.sim.meter import Meter
from cluster.sim.report import MemorySample, slope_bytes_per_s
from cluster.sim.simulation import SimConfig, Simulation
from cluster.sim.timeline import Timeline
from launcher.cli.main import main
from sonar.config import EngineConfig
from sonar.errors import ConfigError
from sonar.messages import FinishReason, LeadHello
from sonar.transport import PeerId, PeerKind

SMALL = SimConfig(nodes=8, devices=4, tp_sizes=(4, 1), steady_s=3, requests_per_s=40, churn_s=0)


def simulate(tmp_path, **changes) -> Simulation:
    simulation = Simulation(SimConfig(**{**vars(SMALL), **changes}), tmp_path, lambda text: None)
    simulation.report = simulation.run()
    return simulation


def test_hosts_join_replicas_load_requests_end(tmp_path) -> None:
    report = simulate(tmp_path).report
    assert (report.num_replicas, report.accepted > 60, report.refused, report.migrations) == (20, True, 0, 0)
    assert dict(report.finished) == {FinishReason.LENGTH.value: report.accepted}
    assert 1.0 < report.converged_s < SMALL.join_s + SMALL.load.most_s + 0.5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_under_churn_every_request_ends_once_and_whole(tmp_path, seed) -> None:
    report = simulate(tmp_path, churn_s=90, churn_requests_per_s=20, faults_per_s=1.0, seed=seed).report
    assert sum(report.finished.values()) == report.accepted > 1500
    assert sum(report.faults.values()) > 50 and report.migrations > 0 and report.checks > 15
    # A request may be convicted of crashes that the churn caused; others must not fail.
    assert all("replicas in a row died" in text for text in report.errors)
    assert report.finished[FinishReason.LENGTH.value] > 0.97 * report.accepted


def test_one_seed_is_one_history(tmp_path) -> None:
    reports = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        reports.append(simulate(tmp_path / name, churn_s=20, seed=5).report)
    first, second = reports
    assert (first.faults, first.finished, first.num_tokens) == (second.faults, second.finished, second.num_tokens)
    assert [phase.simulated_s for phase in first.phases] == [phase.simulated_s for phase in second.phases]


def test_a_device_given_twice_is_found(tmp_path) -> None:
    simulation = simulate(tmp_path)
    agent = next(iter(simulation._churn.agents.values()))
    devices = next(iter(agent.workers.values())).devices
    start = StartWorker(
        worker=WorkerRef(replica_id="tp1-999", incarnation=1),
        world_size=1,
        devices=devices,
        engine="sonar",
        engine_config=EngineConfig(model="sim"),
    )
    assert simulation._link.send(PeerId(PeerKind.AGENT, agent.node_id, agent._peer.generation), start)
    with pytest.raises(AssertionError, match="devices in use"):
        simulation._timeline.run(1.0)


def test_a_wrong_record_is_found(tmp_path) -> None:
    simulation = simulate(tmp_path)
    simulation.control.state.replicas["tp1-3"].is_routed = False
    with pytest.raises(AssertionError, match="tp1-3"):
        simulation._timeline.run(6.0)


class LineCounter:
    """Counts the lines of Python that run: a measure of work that no busy machine changes."""

    def __init__(self) -> None:
        self.lines = 0

    def _trace(self, frame, event, arg):
        self.lines += event == "line"
        return self._trace

    def count(self, function) -> int:
        self.lines, before = 0, sys.gettrace()
        sys.settrace(self._trace)
        try:
            function()
        finally:
            sys.settrace(before)
        return self.lines


def event_costs(tmp_path, nodes: int) -> dict[str, int]:
    """Lines run for one event of each frequent kind, in a cluster of that size."""
    simulation = simulate(tmp_path, nodes=nodes, devices=2, tp_sizes=(1,), steady_s=0)
    state, now = simulation.control.state, simulation._timeline.now_s
    replica = state.replicas["tp1-0"]
    assert replica.state is ReplicaState.READY
    ref, node = replica.worker(0), state.nodes[replica.ranks[0].node_id]
    hello = LeadHello(incarnation=ref.incarnation, replica_id=ref.replica_id, pid=1)
    started = WorkerStarted(worker=ref, pid=7, log_path="log")
    events = {
        "heartbeat": AgentSpoke(node.node_id, node.agent_id, tuple(node.running)),
        "started": AgentReported(node.node_id, node.agent_id, started),
        "hello": LeadSpoke(ref.replica_id, ref.incarnation, hello),
    }
    counter = LineCounter()
    return {name: counter.count(lambda event=event: state.handle(event, now)) for name, event in events.items()}


def test_what_a_frequent_event_costs_does_not_grow_with_the_cluster(tmp_path) -> None:
    for name in ("few", "many"):
        (tmp_path / name).mkdir()
    few, many = event_costs(tmp_path / "few", 4), event_costs(tmp_path / "many", 60)
    assert few == many


def test_a_cut_agent_says_nothing_and_lives(tmp_path) -> None:
    simulation = simulate(tmp_path)
    agent: SimAgent = next(iter(simulation._churn.agents.values()))
    num_workers = len(agent.workers)
    agent.cut()
    simulation._timeline.run(4.0)
    assert simulation.control.state.nodes[agent.node_id].state.value == "lost"
    assert len(agent.workers) == num_workers
    agent.connect()
    simulation._timeline.run(8.0)
    assert simulation.control.state.nodes[agent.node_id].takes_work


def test_actions_of_one_moment_keep_their_order() -> None:
    timeline, seen = Timeline(), []
    for name in "abc":
        timeline.after(1.0, lambda name=name: seen.append((timeline.now_s, name)))
    timeline.every(0.4, lambda: not seen and not timeline.after(0.0, lambda: None), 0.4)
    timeline.run(2.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "c")] and timeline.now_s == 2.0


def test_figures() -> None:
    meter = Meter()
    for microseconds in range(1, 101):
        meter.add_decision(microseconds * 1000)
    assert (meter.decision_us(0.5), meter.decision_us(0.99), meter.costs["request"].count) == (51, 100, 100)
    assert Meter().decision_us(0.99) == 0.0
    assert slope_bytes_per_s([MemorySample(t, 100 + 3 * t) for t in range(10)]) == pytest.approx(3.0)


@pytest.mark.parametrize(("field", "value"), [("nodes", 0), ("devices", 65), ("tp_sizes", (9,)), ("join_s", -1)])
def test_a_wrong_setting_is_named(field, value) -> None:
    with pytest.raises(ConfigError, match=f"{field}="):
        SimConfig(**{field: value})
    assert LoadTimes(1.0, 2.0).least_s == 1.0


def test_the_command_prints_the_figures(capsys) -> None:
    arguments = ["--nodes", "4", "--devices", "2", "--tp", "2", "1", "--steady-s", "1", "--churn-s", "5"]
    assert main(["sim", *arguments, "--log-level", "error"]) == 0
    text = capsys.readouterr().out
    for words in ("4 nodes x 2 devices", "converged", "1,000 a second take", "accept and route", "invariants held"):
        assert words in text
