"""What operators ask for: done when it can be, declined with the reason when not; open streams finish in any case."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.commands import SendToAgent
from cluster.events import DeploymentApplied, Event, NodeRegistered, PeersReached, StopRequested
from cluster.operator_messages import (
    Accepted,
    Declined,
    DrainNode,
    ExplainAsked,
    Explanation,
    ProbeAsked,
    RemoveDeployment,
    RestartDeployment,
    ScaleDeployment,
    StatusAnswer,
    StatusAsked,
)
from cluster.operators import OperatorDesk
from cluster.records import ReplicaState
from cluster.status import ClusterStatus
from cluster.timelines import Timelines
from sonar.messages import Drained
from tests.cluster.world import World, deployment

TIMELINES = Timelines()
EMPTY = ClusterStatus(nodes=[], replicas=[], num_open_requests=0, is_stopping=False)


def desk_of(world: World) -> OperatorDesk:
    def feed(event: Event) -> None:
        world.handle(event)

    return OperatorDesk(world.state, feed, lambda: EMPTY, {"sonar": "1"}, TIMELINES)


@pytest.fixture
def world() -> World:
    world = World()
    world.join("a")
    world.join("b")
    world.handle(DeploymentApplied(deployment(replicas=2)))
    world.settle(0.5)
    return world


def test_the_status_is_the_snapshot(world: World) -> None:
    answer = desk_of(world).answer(StatusAsked())
    assert isinstance(answer, StatusAnswer) and (answer.status, answer.versions) == (EMPTY, {"sonar": "1"})


def test_a_request_is_explained_also_while_the_head_stops(world: World) -> None:
    timelines = Timelines()
    timelines.note("abc-0", "accepted")
    desk = OperatorDesk(world.state, lambda event: None, lambda: EMPTY, {}, timelines)
    world.handle(StopRequested())
    answer = desk.answer(ExplainAsked(request="cmpl-abc"))
    assert isinstance(answer, Explanation) and [t.request_id for t in answer.timelines] == ["abc-0"]


def test_a_probe_is_sent_to_every_node_with_the_addresses_of_the_others(world: World) -> None:
    mark = len(world.commands)
    assert isinstance(desk_of(world).answer(ProbeAsked(number=7)), Accepted)
    sent = {c.node_id: c.message for c in world.commands[mark:] if isinstance(c, SendToAgent)}
    assert {name: (message.number, sorted(message.peers)) for name, message in sent.items()} == {
        "a": (7, ["b"]),
        "b": (7, ["a"]),
    }
    agent = next(agent for agent in world.agents.values() if agent.node_id == "a")
    world.handle(PeersReached("a", agent.agent_id, 7, {"b": 0.001}))
    assert (world.state.nodes["a"].probe_number, world.state.nodes["a"].reach) == (7, {"b": 0.001})


def test_drain_moves_the_work_and_undo_takes_it_back(world: World) -> None:
    desk = desk_of(world)
    answer = desk.answer(DrainNode(node_id="a", drain=True))
    assert isinstance(answer, Accepted) and "a takes no new work; m-" in answer.text
    assert [r.state for r in world.state.replicas.values()].count(ReplicaState.DRAINING) == 1
    assert not world.state.nodes["a"].takes_work
    answer = desk.answer(DrainNode(node_id="a", drain=False))
    assert answer == Accepted(text="a takes work again") and world.state.nodes["a"].takes_work


def test_scale_up_and_down(world: World) -> None:
    desk = desk_of(world)
    answer = desk.answer(ScaleDeployment(name="m", replicas=3))
    assert isinstance(answer, Accepted) and "m: 2 -> 3 replicas" in answer.text
    world.settle(0.5)
    assert len(world.ready()) == 3
    desk.answer(ScaleDeployment(name="m", replicas=1))
    states = {r.replica_id: r.state for r in world.state.replicas.values()}
    assert states["m-0"] is ReplicaState.READY
    assert {states["m-1"], states["m-2"]} == {ReplicaState.DRAINING}


def test_roles_are_given_with_the_number_of_replicas_and_refused_without_a_way_for_blocks(world: World) -> None:
    desk = desk_of(world)
    answer = desk.answer(ScaleDeployment(name="m", replicas=2, prefill_replicas=1))
    assert isinstance(answer, Declined) and "set kv_transfer" in answer.reason
    config = world.state.deployments["m"]
    moving = dataclasses.replace(config.engine_config, kv_transfer="shm")
    world.handle(DeploymentApplied(dataclasses.replace(config, engine_config=moving)))
    answer = desk.answer(ScaleDeployment(name="m", replicas=3, prefill_replicas=1))
    assert isinstance(answer, Accepted) and "m: 2 -> 3 replicas, 1 of them for prompts" in answer.text
    assert desk.answer(ScaleDeployment(name="m", replicas=2)) == Accepted(
        text=f"m: 3 -> 2 replicas, 1 of them for prompts ({answer.text.rpartition('(')[2]}"
    )
    assert world.state.deployments["m"].prefill_replicas == 1


def test_a_restart_is_of_one_replica_at_a_time(world: World) -> None:
    assert isinstance(desk_of(world).answer(RestartDeployment(name="m")), Accepted)
    low = len(world.ready())
    for _ in range(40):
        world.advance(0.25)
        for agent in world.agents.values():
            for ref in list(agent.workers):
                if world.state.replicas[ref.replica_id].state is ReplicaState.DRAINING:
                    world.lead_says(ref, Drained(incarnation=ref.incarnation))
                    world.exit(agent, ref, was_asked=True)
        low = min(low, len(world.ready()))
        world.settle(0.25)
    assert low == 1, "never both"
    assert {r.incarnation for r in world.state.replicas.values()} == {2}
    assert len(world.ready()) == 2


def test_a_restart_stops_where_a_replica_does_not_come_back(world: World) -> None:
    desk_of(world).answer(RestartDeployment(name="m"))
    world.advance(1.0)
    states = sorted(replica.state.value for replica in world.state.replicas.values())
    assert states == ["draining", "ready"]
    world.advance(5.0)
    assert sorted(replica.state.value for replica in world.state.replicas.values()) == states


def test_rm_drains_every_replica(world: World) -> None:
    assert isinstance(desk_of(world).answer(RemoveDeployment(name="m")), Accepted)
    assert {r.state for r in world.state.replicas.values()} == {ReplicaState.DRAINING}
    assert not world.state.deployments


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (DrainNode(node_id="c", drain=True), "no node 'c'; there are: a, b"),
        (ScaleDeployment(name="mm", replicas=2), "no deployment 'mm'; did you mean m?"),
        (ScaleDeployment(name="m", replicas=-1), "replicas=-1; choose 0 to 10000"),
        (RemoveDeployment(name="other"), "no deployment 'other'; there are: m"),
        (RestartDeployment(name="other"), "no deployment 'other'; there are: m"),
    ],
)
def test_what_cannot_be_is_declined_with_the_reason(world: World, message, words: str) -> None:
    before = len(world.commands)
    answer = desk_of(world).answer(message)
    assert isinstance(answer, Declined) and words in answer.reason
    assert len(world.commands) == before


def test_the_registration_of_a_node_keeps_what_an_operator_said(world: World) -> None:
    desk_of(world).answer(DrainNode(node_id="a", drain=True))
    agent = next(agent for agent in world.agents.values() if agent.node_id == "a")
    assert isinstance(agent.register(), NodeRegistered)
    world.handle(agent.register())
    assert not world.state.nodes["a"].takes_work
