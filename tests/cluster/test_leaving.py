"""Hosts that leave, are drained, or are waited for: work drains, goes elsewhere, begins when all are here."""

from __future__ import annotations

from cluster.commands import CloseRoute, DrainRoute
from cluster.config import NodesConfig, RestartPolicy, Timeouts
from cluster.events import DeploymentApplied, NodeDrainRequested, NodeGone, NodeLeaving
from cluster.records import ReplicaState
from cluster.state import ClusterState
from sonar.messages import Drained
from tests.cluster.world import VERSIONS, World, deployment


def of_type(commands, kind):
    return [c for c in commands if isinstance(c, kind)]


def two_nodes() -> World:
    world = World()
    world.join("a")
    world.join("b")
    world.handle(DeploymentApplied(deployment(replicas=2)))
    world.settle(0.5)
    assert len(world.ready()) == 2
    return world


def node_of(world: World, replica_id: str) -> str:
    return world.state.replicas[replica_id].ranks[0].node_id


def test_an_agent_that_leaves_has_its_replicas_drained_and_started_elsewhere() -> None:
    world = two_nodes()
    replica = next(r for r in world.state.replicas.values() if node_of(world, r.replica_id) == "a")
    agent = next(agent for agent in world.agents.values() if agent.node_id == "a")
    commands = world.handle(NodeLeaving("a", agent.agent_id))
    assert [c.replica_id for c in of_type(commands, DrainRoute)] == [replica.replica_id]
    assert replica.state is ReplicaState.DRAINING and replica.is_recovering
    (ref,) = agent.workers
    commands = world.lead_says(ref, Drained(incarnation=1)) or world.commands
    assert not [c for c in of_type(commands, CloseRoute) if c.blames_requests]
    world.exit(agent, ref, was_asked=True)
    world.settle(0.5)
    assert node_of(world, replica.replica_id) == "b" and replica.state is ReplicaState.READY
    assert replica.failure.count == 0


def test_a_new_agent_of_a_host_that_left_takes_work_again_but_not_of_a_drained_one() -> None:
    for event, takes_work in ((None, True), (NodeDrainRequested("a"), False)):
        world = World()
        agent = world.join("a")
        if event is not None:
            world.handle(event)
        world.handle(NodeLeaving("a", agent.agent_id))
        world.handle(NodeGone("a", agent.agent_id, "its agent left"))
        world.join("a")
        assert world.state.nodes["a"].takes_work is takes_work


def test_the_word_of_an_earlier_agent_does_not_count() -> None:
    world = two_nodes()
    world.handle(NodeLeaving("a", 99))
    assert world.state.nodes["a"].takes_work


def test_a_loading_replica_ends_when_its_node_is_drained() -> None:
    world = World()
    agent = world.join("a")
    world.join("b")
    world.handle(DeploymentApplied(deployment()))
    replica = world.state.replicas["m-0"]
    assert node_of(world, "m-0") == "a" and replica.state is ReplicaState.STARTING
    world.handle(NodeDrainRequested("a"))
    assert replica.state is ReplicaState.STOPPING
    while agent.inbox:
        world.deliver(agent)
    world.settle(0.5)
    assert node_of(world, "m-0") == "b" and replica.failure.count == 0


def test_nothing_is_placed_before_all_expected_nodes_are_here() -> None:
    world = World()
    world.state = ClusterState(Timeouts(), RestartPolicy(), VERSIONS, 0, NodesConfig(min=2, join_timeout_s=30.0))
    world.handle(DeploymentApplied(deployment(replicas=2)))
    world.join("a")
    world.advance(29)
    assert {r.state for r in world.state.replicas.values()} == {ReplicaState.PLACING}
    assert world.state.replicas["m-0"].note == "waits for nodes: 1 more of any name"
    world.join("b")
    assert {node_of(world, name) for name in ("m-0", "m-1")} == {"a", "b"}


def test_after_the_deadline_the_rest_begins() -> None:
    world = World()
    world.state = ClusterState(Timeouts(), RestartPolicy(), VERSIONS, 0, NodesConfig(("a", "b"), join_timeout_s=30.0))
    world.handle(DeploymentApplied(deployment()))
    world.join("a")
    world.advance(31)
    assert "missing b" in world.state.roll_call.failure
    assert node_of(world, "m-0") == "a"
