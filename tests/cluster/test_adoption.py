"""A head that follows another: which workers it takes over, which it ends, and whom it waits for."""

from __future__ import annotations

import msgspec
import pytest

from cluster.commands import AskRoll, OpenRoute, ResyncRoute, SendToAgent
from cluster.config import Timeouts
from cluster.events import DeploymentApplied
from cluster.messages import KillReplica, StartWorker
from cluster.records import ReplicaState
from sonar.config import ParallelConfig
from sonar.messages import Draining, HeldRequest, LeadHello, LoadProgress, Roll
from tests.cluster.world import FakeAgent, World, deployment, lead_ready


def serving(
    replicas: int = 1, hosts: str = "a", num_devices: int = 0, **engine: object
) -> tuple[World, list[FakeAgent]]:
    """A world whose replicas are ready."""
    world = World()
    agents = [world.join(name, num_devices) for name in hosts]
    world.handle(DeploymentApplied(deployment(replicas=replicas, **engine)))
    world.settle(0.5)
    assert len(world.ready()) == replicas
    world.commands.clear()
    return world, agents


def of_type(world: World, kind):
    return [command for command in world.commands if isinstance(command, kind)]


def sent(world: World, kind):
    return [c.message for c in of_type(world, SendToAgent) if isinstance(c.message, kind)]


def roll(ref, *requests: HeldRequest) -> Roll:
    return Roll(incarnation=ref.incarnation, ready=lead_ready(ref), next_sequence=7, requests=list(requests))


def test_a_running_replica_is_asked_what_it_has_and_serves_on_under_its_incarnation() -> None:
    world, (agent,) = serving()
    (ref,) = agent.workers
    world.new_head()
    replica = world.state.replicas["m-0"]
    assert replica.state is ReplicaState.ADOPTING and of_type(world, AskRoll) == [AskRoll("m-0", 1)]
    assert world.state.is_adopting and not of_type(world, OpenRoute)
    held = HeldRequest(request_id="r~1", first=0, end=5, is_finished=False)
    world.lead_says(ref, roll(ref, held))
    (opened,) = of_type(world, OpenRoute)
    assert opened.incarnation == 1 and opened.roll is not None and opened.roll.requests == [held]
    assert not sent(world, StartWorker) and not sent(world, KillReplica) and not world.state.is_adopting
    world.exit(agent, ref, signal=9)
    assert [m.worker.incarnation for m in sent(world, StartWorker)] == [2], "and its next one is a new number"


def test_a_lead_that_does_not_hear_is_asked_again_then_given_up() -> None:
    world, (agent,) = serving()
    (ref,) = agent.workers
    world.new_head()
    world.lead_says(ref, LeadHello(incarnation=1, replica_id="m-0", pid=1))
    world.advance(3)
    assert 4 <= len(of_type(world, AskRoll)) <= 6, "at once, at its hello, and each second"
    world.advance(3)
    assert sent(world, KillReplica)[0].incarnation == 1
    world.settle(1)
    assert world.ready() == ["m-0"] and world.recorded["m-0"] == 2


@pytest.mark.parametrize("change", ["settings", "removed", "fewer"])
def test_what_is_not_wanted_as_it_runs_is_ended(change: str) -> None:
    world, (agent,) = serving(replicas=2)
    if change == "settings":
        config = deployment(replicas=2, seed=5)
        world.state.deployments["m"] = config
    elif change == "removed":
        world.state.deployments.pop("m")
    else:
        world.state.deployments["m"] = deployment(replicas=1)
    world.new_head()
    killed = {(kill.replica_id, kill.incarnation) for kill in sent(world, KillReplica)}
    everything = {("m-0", 1), ("m-1", 1)}
    assert killed == ({("m-1", 1)} if change == "fewer" else everything)
    world.settle(1)
    assert len(world.ready()) == {"settings": 2, "removed": 0, "fewer": 1}[change]
    assert {ref.incarnation for ref in agent.workers} == {"settings": {2}, "removed": set(), "fewer": {1}}[change]


def test_nothing_is_started_beside_hosts_that_have_not_come_back_yet() -> None:
    world, (a, b) = serving(replicas=2, hosts="ab")
    b.is_reachable = False
    world.new_head()
    world.make_ready(a, next(iter(a.workers)))
    world.advance(2)
    assert not sent(world, StartWorker) and "under an earlier head: b" in world.state.replicas["m-1"].note
    b.is_reachable = True
    world.handle(b.register())
    world.settle(0.5)
    assert world.ready() == ["m-0", "m-1"] and not sent(world, StartWorker) and not world.state.is_adopting


def test_a_host_that_does_not_come_back_is_not_waited_for_longer_than_its_time() -> None:
    world, (_, b) = serving(replicas=2, hosts="ab")
    b.is_reachable = False
    world.new_head()
    world.settle(Timeouts().adopt_s + 1)
    assert world.ready() == ["m-0", "m-1"]
    assert [m.worker.replica_id for m in sent(world, StartWorker)] == ["m-1"]
    b.is_reachable = True
    world.handle(b.register())
    assert sent(world, KillReplica) == [KillReplica(replica_id="m-1", incarnation=1)], "too late: it is fenced"


def test_a_replica_over_two_hosts_is_taken_over_when_both_have_said_so() -> None:
    world, (a, b) = serving(hosts="ab", num_devices=1, parallel=ParallelConfig(tp_size=2))
    lead, other = (a, b) if next(iter(a.workers)).rank == 0 else (b, a)
    (ref,) = lead.workers
    other.is_reachable = False
    world.new_head()
    world.lead_says(ref, roll(ref))
    assert not of_type(world, AskRoll) and not of_type(world, OpenRoute)
    other.is_reachable = True
    world.handle(other.register())
    assert of_type(world, AskRoll)
    world.lead_says(ref, roll(ref))
    assert world.ready() == ["m-0"] and not sent(world, KillReplica)


def test_a_part_of_a_replica_is_ended_and_all_of_it_started_anew() -> None:
    world, (_, b) = serving(hosts="ab", num_devices=1, parallel=ParallelConfig(tp_size=2))
    world.kill_agent(b)
    world.new_head()
    world.settle(Timeouts().adopt_s + 1)
    assert [kill.incarnation for kill in sent(world, KillReplica)] == [1] and not world.ready()
    world.join("c", 1)
    world.settle(1)
    assert world.ready() == ["m-0"] and world.recorded["m-0"] == 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_start_that_was_under_way_goes_on_if_it_is_of_one_rank(num_ranks: int) -> None:
    world = World()
    agent = world.join("a", num_devices=2)
    world.handle(DeploymentApplied(deployment(parallel=ParallelConfig(tp_size=num_ranks))))
    while agent.inbox:
        world.deliver(agent)
    ref = min(agent.workers)
    world.new_head()
    world.lead_says(ref, LoadProgress(incarnation=1, phase="weights", done=1, total=2))
    replica = world.state.replicas["m-0"]
    assert replica.state is (ReplicaState.LOADING if num_ranks == 1 else ReplicaState.STOPPING)
    world.settle(1)
    assert world.ready() == ["m-0"] and world.routes["m-0"] == num_ranks
    if num_ranks == 1:
        assert of_type(world, ResyncRoute), "it may have become ready under the earlier head"


def test_a_lead_that_drains_is_not_taken_over() -> None:
    world, (agent,) = serving()
    (ref,) = agent.workers
    world.new_head()
    world.lead_says(ref, Draining(incarnation=1))
    assert world.state.replicas["m-0"].state is ReplicaState.STOPPING
    world.settle(1)
    assert world.ready() == ["m-0"] and world.recorded["m-0"] == 2


def test_an_accelerator_is_not_given_twice() -> None:
    world, (agent,) = serving(num_devices=1, device="cuda")
    (ref,) = agent.workers
    twin = msgspec.structs.replace(ref, replica_id="m-1")
    agent.workers[twin] = msgspec.structs.replace(agent.workers[ref], worker=twin)
    world.state.deployments["m"] = deployment(replicas=2, device="cuda")
    world.new_head()
    assert len([r for r in world.state.replicas.values() if r.state is ReplicaState.ADOPTING]) == 1
    assert len(sent(world, KillReplica)) == 1
