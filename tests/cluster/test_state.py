"""The cluster's state machine: single transitions by example, all of them together under random histories."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.commands import Announce, CloseRoute, DrainRoute, ResyncRoute, SendToAgent
from cluster.config import RestartPolicy, Timeouts
from cluster.events import (
    AgentReported,
    AgentSpoke,
    DeploymentApplied,
    DeploymentRemoved,
    LeadSpoke,
    NodeDrainRequested,
    NodeGone,
    StopRequested,
    Tick,
)
from cluster.head_gateway import served_models
from cluster.journal import MemoryJournal
from cluster.messages import KillReplica, Refused, RegisterAgain, Registered, StartFailed, StartWorker, StopWorker
from cluster.records import NodeState, ReplicaState
from cluster.requests import RequestTable
from cluster.state import fault_reason
from sonar.config import ParallelConfig
from sonar.messages import Drained, Draining, Fault, LeadHello, LoadProgress, StepAhead
from sonar.process import EXIT_USER_ERROR
from tests.cluster.world import FakeAgent, World, deployment, lead_ready, lead_stats


def started(world: World | None = None, replicas: int = 1) -> tuple[World, FakeAgent]:
    """A node, and a deployment whose replicas are ready."""
    world = world or World()
    agent = world.join("a")
    world.handle(DeploymentApplied(deployment(replicas=replicas)))
    world.settle(0.5)
    assert len(world.ready()) == replicas
    return world, agent


class NoLeads:
    def send_to_lead(self, replica_id, incarnation, message):
        return False


def of_type(commands, kind):
    return [c for c in commands if isinstance(c, kind)]


def sent(commands, kind):
    return [c.message for c in commands if isinstance(c, SendToAgent) and isinstance(c.message, kind)]


def test_a_replica_waits_for_a_node_and_says_so() -> None:
    world = World()
    assert not sent(world.handle(DeploymentApplied(deployment())), StartWorker)
    assert "no node is up" in world.state.replicas["m-0"].note
    world.join("a")
    assert world.state.replicas["m-0"].state is ReplicaState.STARTING


def test_a_host_that_joins_late_takes_what_had_no_place_and_moves_nothing_that_serves() -> None:
    world = World()
    world.join("a", num_devices=2)
    world.handle(DeploymentApplied(deployment(replicas=3, device="cuda")))
    world.settle(0.5)
    before = {
        name: (world.state.replicas[name].incarnation, world.state.replicas[name].ranks[0].node_id)
        for name in world.ready()
    }
    assert sorted(before) == ["m-0", "m-1"] and "more than are free" in world.state.replicas["m-2"].note
    world.join("b", num_devices=4)
    world.settle(0.5)
    after = {
        name: (world.state.replicas[name].incarnation, world.state.replicas[name].ranks[0].node_id)
        for name in world.ready()
    }
    assert after.pop("m-2")[1] == "b" and after == before


def test_a_replica_that_no_host_can_hold_says_so_once_and_in_its_note() -> None:
    world = World()
    for name in "ab":
        world.join(name)
    world.handle(DeploymentApplied(deployment(replicas=2, device="cuda")))
    world.advance(5)
    told = [c.text for c in of_type(world.commands, Announce) if "no place" in c.text]
    assert told == ["m-0 has no place: no CUDA device on any host; use --device cpu"]
    notes = {replica.note for replica in world.state.replicas.values()}
    assert notes == {"no CUDA device on any host; use --device cpu; free of all: a 0/0, b 0/0"}
    table = RequestTable(MemoryJournal(), NoLeads(), lambda: 0.0)
    assert served_models(world.state, table, 0)[0].note in notes


def test_start_to_ready_passes_each_state() -> None:
    world = World()
    agent = world.join("a")
    (start,) = sent(world.handle(DeploymentApplied(deployment())), StartWorker)
    replica = world.state.replicas["m-0"]
    assert (start.worker.incarnation, replica.state) == (1, ReplicaState.STARTING)
    assert [type(m) for m in agent.inbox] == [Registered, StartWorker]
    world.deliver(agent)
    world.deliver(agent)
    assert replica.state is ReplicaState.LOADING
    world.make_ready(agent, start.worker)
    assert replica.state is ReplicaState.READY and world.routes == {"m-0": 1}


def test_a_crash_closes_the_route_and_starts_a_higher_incarnation_at_once() -> None:
    world, agent = started()
    (ref,) = agent.workers
    mark = len(world.commands)
    world.exit(agent, ref, signal=9)
    commands = world.commands[mark:]
    (close,) = of_type(commands, CloseRoute)
    assert (close.incarnation, close.blames_requests) == (1, True) and "SIGKILL" in close.reason
    (start,) = sent(commands, StartWorker)
    assert start.worker.incarnation == 2
    assert world.state.replicas["m-0"].failure.log_tail == "last words"


def test_crash_loop_backs_off_then_fails_with_the_log_and_is_retried_later() -> None:
    world = World(restart=RestartPolicy(crash_limit=3, backoff_s=1.0, retry_s=100.0))
    agent = world.join("a")
    world.handle(DeploymentApplied(deployment()))
    replica = world.state.replicas["m-0"]
    starts = []
    for _ in range(100):
        while agent.inbox:
            world.deliver(agent)
        for ref in list(agent.workers):
            starts.append(world.now)
            world.exit(agent, ref, code=1)
        world.advance(0.25)
    assert len(starts) == 3 and replica.state is ReplicaState.FAILED
    assert starts[1] - starts[0] <= 0.25 and 1.0 <= starts[2] - starts[1] <= 1.5
    assert "exit code 1" in replica.failure.reason and replica.failure.log_tail == "last words"
    world.advance(100)
    world.settle(1)
    assert replica.state is ReplicaState.READY


def test_what_an_engine_has_to_tell_is_announced_as_a_warning() -> None:
    world = World()
    agent = world.join("a")
    world.handle(DeploymentApplied(deployment()))
    while agent.inbox:
        world.deliver(agent)
    (ref,) = agent.workers
    notice = "context lowered from 8192 to 600 tokens"
    world.lead_says(ref, msgspec.structs.replace(lead_ready(ref), notices=(notice,)))
    assert Announce(f"m-0: {notice}", is_failure=True) in world.commands


def test_a_users_error_is_not_tried_again() -> None:
    world = World()
    agent = world.join("a")
    world.handle(DeploymentApplied(deployment()))
    while agent.inbox:
        world.deliver(agent)
    (ref,) = agent.workers
    world.lead_says(ref, Fault(incarnation=1, rank=0, step=-1, error="no such model", traceback=""))
    assert sent(world.commands, StopWorker)
    agent.inbox.clear()
    world.exit(agent, ref, code=EXIT_USER_ERROR, was_asked=True)
    world.advance(1000)
    replica = world.state.replicas["m-0"]
    assert replica.state is ReplicaState.FAILED and replica.failure.reason == "no such model"
    assert len([c for c in of_type(world.commands, Announce) if "no such model" in c.text]) == 1
    assert world.recorded == {"m-0": 1}


def test_a_users_error_of_any_rank_is_told_in_its_own_words_and_not_tried_again() -> None:
    world = World()
    agent = world.join("a")
    world.handle(DeploymentApplied(deployment(parallel=ParallelConfig(tp_size=2))))
    while agent.inbox:
        world.deliver(agent)
    ref = next(iter(agent.workers))
    fault = Fault(incarnation=1, rank=1, step=-1, error="tensor 'x' is missing", traceback="", is_user_error=True)
    world.lead_says(ref, fault)
    replica = world.state.replicas["m-0"]
    assert replica.failure.reason == "tensor 'x' is missing" and replica.failure.is_permanent
    other = msgspec.structs.replace(fault, is_user_error=False)
    assert fault_reason(other, 2, "a") == "rank 1 on a faulted before its first step: tensor 'x' is missing"
    assert fault_reason(msgspec.structs.replace(other, step=7), 2, "a").startswith("rank 1 faulted after step 7: ")


def test_start_failed_permanently_is_final() -> None:
    world = World()
    agent = world.join("a")
    (start,) = sent(world.handle(DeploymentApplied(deployment())), StartWorker)
    world.report(agent, StartFailed(worker=start.worker, error="unknown engine", permanent=True))
    assert world.state.replicas["m-0"].state is ReplicaState.FAILED


def test_progress_moves_the_load_deadline_and_a_stall_ends_the_start() -> None:
    world = World(Timeouts(load_stall_s=10.0))
    agent = world.join("a")
    world.handle(DeploymentApplied(deployment()))
    while agent.inbox:
        world.deliver(agent)
    (ref,) = agent.workers
    replica = world.state.replicas["m-0"]
    for done in range(6):
        world.lead_says(ref, LoadProgress(incarnation=1, phase="weights", done=done, total=9))
        world.advance(8)
    assert replica.state is ReplicaState.LOADING, "48 s of loading, never 10 without progress"
    for _ in range(3):
        world.lead_says(ref, LoadProgress(incarnation=1, phase="weights", done=5, total=9))
        world.advance(1)
    assert replica.state is ReplicaState.STOPPING and "'weights' (5/9)" in replica.failure.reason
    assert sent(world.commands, KillReplica)[-1].dump_stacks


def test_start_deadline_names_the_missing_ranks() -> None:
    world = World(Timeouts(start_s=5.0))
    world.join("a")
    world.handle(DeploymentApplied(deployment()))
    world.advance(5.5)
    assert "ranks [0] were not spawned" in world.state.replicas["m-0"].failure.reason


def test_a_silent_engine_loop_is_killed() -> None:
    world, agent = started(World(Timeouts(hang_s=10.0)))
    for _ in range(12):
        world.now += 1.0
        world.handle(AgentSpoke("a", agent.agent_id, tuple(agent.workers)))
        commands = world.handle(Tick())
    (close,) = of_type(world.commands, CloseRoute)
    assert close.blames_requests and "no sign of life" in close.reason
    assert commands == []
    world.settle(1)
    assert world.ready() == ["m-0"] and world.recorded["m-0"] == 2


@pytest.mark.parametrize(("expected_s", "allowed_s"), [(1.0, 10), (20.0, 80)])
def test_a_long_step_that_was_announced_is_no_hang_until_it_is(expected_s: float, allowed_s: int) -> None:
    world, agent = started(World(Timeouts(hang_s=10.0)))
    (ref,) = agent.workers
    world.lead_says(ref, StepAhead(incarnation=1, step=7, num_tokens=2048, expected_s=expected_s))
    for second in range(1, allowed_s + 2):
        world.now += 1.0
        world.handle(AgentSpoke("a", agent.agent_id, tuple(agent.workers)))
        world.handle(Tick())
        assert bool(of_type(world.commands, CloseRoute)) == (second >= allowed_s), second
    (close,) = of_type(world.commands, CloseRoute)
    assert f"expected to take {expected_s:.1f} s" in close.reason


def test_patience_ends_with_the_long_step() -> None:
    world, agent = started(World(Timeouts(hang_s=10.0)))
    (ref,) = agent.workers
    world.lead_says(ref, StepAhead(incarnation=1, step=7, num_tokens=2048, expected_s=20.0))
    world.lead_says(ref, lead_stats(1))
    for _ in range(10):
        world.now += 1.0
        world.handle(AgentSpoke("a", agent.agent_id, tuple(agent.workers)))
        world.handle(Tick())
    assert len(of_type(world.commands, CloseRoute)) == 1


def test_a_lost_node_moves_its_replica_and_its_return_kills_what_still_runs() -> None:
    world, a = started()
    a.is_reachable = False
    b = world.join("b")
    world.advance(2.5)
    assert world.state.nodes["a"].state is NodeState.UP
    world.advance(1)
    assert world.state.nodes["a"].state is NodeState.LOST
    (close,) = of_type(world.commands, CloseRoute)
    assert not close.blames_requests
    world.settle(1)
    assert world.ready() == ["m-0"] and [r.incarnation for r in b.workers] == [2]
    a.is_reachable = True
    world.settle(1)
    assert not a.workers and world.state.nodes["a"].state is NodeState.UP


def test_leads_keep_a_node_whose_agent_is_stuck_but_nothing_is_placed_there() -> None:
    world, agent = started()
    (ref,) = agent.workers
    for _ in range(40):
        world.now += 0.25
        world.lead_says(ref, lead_stats(1))
        world.handle(Tick())
    assert world.state.nodes["a"].state is NodeState.UP and world.ready() == ["m-0"]
    world.handle(DeploymentApplied(deployment(replicas=2)))
    assert world.state.replicas["m-1"].state is ReplicaState.PLACING


def test_a_head_that_slept_blames_nobody() -> None:
    world, _ = started(World(Timeouts(hang_s=5.0)))
    world.now += 60.0
    world.handle(Tick())
    assert world.state.nodes["a"].state is NodeState.UP and world.ready() == ["m-0"]


def test_an_agents_restart_is_seen_at_once() -> None:
    world, agent = started()
    world.kill_agent(agent)
    world.handle(NodeGone("a", agent.agent_id, "process ended: signal SIGKILL"))
    assert world.ready() == []
    world.join("a")
    world.settle(1)
    assert world.ready() == ["m-0"] and world.recorded["m-0"] == 2


def test_a_new_agent_of_the_node_replaces_the_old_one() -> None:
    world, old = started()
    new = world.join("a")
    assert "took over" in sent(world.commands, Refused)[-1].reason
    world.settle(1)
    assert old.is_over and [r.incarnation for r in new.workers] == [2]
    assert [type(m) for m in sent(world.handle(AgentSpoke("a", old.agent_id, tuple(old.workers))), object)] == [
        RegisterAgain
    ]


def test_two_hosts_of_one_name_and_other_versions_are_refused_by_name() -> None:
    world, _ = started()
    twin = FakeAgent("a", 77, boot_id="other")
    world.agents[77] = twin
    (refused,) = sent(world.handle(twin.register()), Refused)
    assert "another host" in refused.reason
    event = FakeAgent("c", 78).register()
    world.agents[78] = FakeAgent("c", 78)
    register = {f: getattr(event.register, f) for f in event.register.__struct_fields__} | {"versions": {"sonar": "2"}}
    (refused,) = sent(world.handle(dataclasses.replace(event, register=type(event.register)(**register))), Refused)
    assert "Sonar 2 there, 1 here" in refused.reason
    assert "c" not in world.state.nodes


def test_a_same_agents_reconnect_changes_nothing_and_loses_a_missing_worker() -> None:
    world, agent = started(replicas=2)
    world.handle(agent.register())
    assert world.ready() == ["m-0", "m-1"]
    gone = next(ref for ref in agent.workers if ref.replica_id == "m-1")
    del agent.workers[gone]
    world.handle(agent.register())
    assert world.ready() == ["m-0"] and world.recorded["m-1"] == 2


def test_scale_down_drains_the_highest_and_scale_up_goes_on_counting() -> None:
    world, _ = started(replicas=2)
    world.handle(DeploymentApplied(deployment(replicas=1)))
    (drain,) = of_type(world.commands, DrainRoute)
    assert (drain.replica_id, drain.ask_lead) == ("m-1", True)
    world.handle(LeadSpoke("m-1", 1, Drained(incarnation=1)))
    world.settle(0.5)
    assert world.ready() == ["m-0"] and "m-1" not in world.state.replicas
    world.handle(DeploymentApplied(deployment(replicas=2)))
    world.settle(0.5)
    assert world.ready() == ["m-0", "m-1"] and world.routes["m-1"] == 2


def test_a_removed_deployment_drains_and_a_drain_has_a_deadline() -> None:
    world, _ = started(World(Timeouts(drain_s=5.0)))
    world.handle(DeploymentRemoved("m"))
    world.advance(4)
    assert world.routes == {"m-0": 1}
    world.settle(2)
    assert world.state.replicas == {} and not of_type(world.commands, CloseRoute)[0].blames_requests


def test_a_lead_told_to_end_by_someone_else_drains_and_is_replaced_without_a_failure() -> None:
    world, agent = started()
    (ref,) = agent.workers
    world.lead_says(ref, Draining(incarnation=1))
    (drain,) = of_type(world.commands, DrainRoute)
    assert not drain.ask_lead
    world.lead_says(ref, Drained(incarnation=1))
    world.settle(1)
    replica = world.state.replicas["m-0"]
    assert world.ready() == ["m-0"] and replica.incarnation == 2 and replica.failure.count == 0


def test_draining_a_node_moves_its_replicas() -> None:
    world, a = started()
    world.join("b")
    world.handle(NodeDrainRequested("a"))
    (ref,) = a.workers
    world.lead_says(ref, Drained(incarnation=1))
    world.settle(1)
    assert world.ready() == ["m-0"] and not a.workers


def test_stop_drains_everything_and_starts_nothing() -> None:
    world, agent = started(replicas=2)
    world.handle(DeploymentApplied(deployment("n", replicas=1)))
    world.handle(StopRequested())
    assert {c.replica_id for c in of_type(world.commands, DrainRoute)} == {"m-0", "m-1"}
    for replica_id in ("m-0", "m-1"):
        world.handle(LeadSpoke(replica_id, 1, Drained(incarnation=1)))
    world.settle(1)
    assert world.state.is_stopped and not agent.workers


def test_a_second_hello_resyncs_a_serving_replica() -> None:
    world, agent = started()
    (ref,) = agent.workers
    world.lead_says(ref, LeadHello(incarnation=1, replica_id="m-0", pid=1))
    assert of_type(world.commands, ResyncRoute)[-1].incarnation == 1


def test_stale_reports_are_answered_by_a_kill_and_stale_leads_by_nothing() -> None:
    world, agent = started()
    (ref,) = agent.workers
    world.exit(agent, ref, code=1)
    assert world.handle(LeadSpoke("m-0", 1, LeadHello(incarnation=1, replica_id="m-0", pid=1))) == []
    late = sent(world.commands, StartWorker)[0].worker
    from cluster.messages import WorkerStarted

    commands = world.handle(AgentReported("a", agent.agent_id, WorkerStarted(worker=late, pid=5, log_path="")))
    assert sent(commands, KillReplica) == [KillReplica(replica_id="m-0", incarnation=1)]


def test_an_unreported_exit_keeps_its_device_out_of_use() -> None:
    world = World(Timeouts(fence_s=2.0, hang_s=5.0))
    agent = world.join("a", num_devices=2)
    world.handle(DeploymentApplied(deployment()))
    world.settle(0.5)
    (ref,) = agent.workers
    assert agent.workers[ref].devices == [0]
    for _ in range(40):  # the lead is silent; the agent beats but its kill does not work
        world.now += 0.25
        world.handle(AgentSpoke("a", agent.agent_id, tuple(agent.workers)))
        world.handle(Tick())
    assert world.state.nodes["a"].held == {ref: (0,)}
    (start,) = [m for m in agent.inbox if isinstance(m, StartWorker)]
    assert start.devices == [1]
    world.exit(agent, ref, signal=9, was_asked=True)
    assert world.state.nodes["a"].held == {}


def test_one_dead_rank_ends_the_whole_replica_over_all_its_hosts() -> None:
    world = World()
    a, b = world.join("a", num_devices=1), world.join("b", num_devices=1)
    world.handle(DeploymentApplied(deployment(parallel=ParallelConfig(tp_size=2))))
    world.settle(0.5)
    assert world.ready() == ["m-0"] and len(a.workers) == len(b.workers) == 1
    (ref,) = b.workers
    world.exit(b, ref, signal=11)
    replica = world.state.replicas["m-0"]
    assert replica.state is ReplicaState.STOPPING and isinstance(a.inbox[-1], KillReplica)
    world.settle(1)
    assert world.ready() == ["m-0"] and world.recorded["m-0"] == 2


def test_failures_are_announced() -> None:
    world, agent = started()
    (ref,) = agent.workers
    world.exit(agent, ref, signal=11)
    assert any(c.is_failure and "SIGSEGV" in c.text for c in of_type(world.commands, Announce))


OPERATIONS = (
    "advance",
    "advance",
    "deliver",
    "deliver",
    "deliver",
    "ready",
    "ready",
    "crash",
    "user_error",
    "fault",
    "kill_agent",
    "join",
    "partition",
    "heal",
    "apply",
    "drop_message",
    "stale",
    "drained",
    "draining",
    "drain_node",
    "remove",
    "sleep",
    "reregister",
    "new_head",
)


def perform(world: World, operation: str, number: int) -> None:
    agents = [a for a in world.agents.values() if not a.is_over]
    agent = agents[number % len(agents)] if agents else None
    refs = sorted(agent.workers) if agent else []
    ref = refs[number % len(refs)] if refs else None
    match operation:
        case "advance":
            world.advance(0.25 + number % 8)
        case "sleep":
            world.now += 10 + number % 50
            world.handle(Tick())
        case "join" if len(agents) < 5:
            world.join(f"n{number % 4}", num_devices=number % 3)
        case "apply":
            parallel = ParallelConfig(tp_size=1 + number % 2)
            world.handle(DeploymentApplied(deployment(f"d{number % 2}", replicas=number % 4, parallel=parallel)))
        case "new_head":
            world.new_head()
        case "remove":
            world.handle(DeploymentRemoved(f"d{number % 2}"))
        case "stale":
            for replica in list(world.state.replicas.values()):
                hello = LeadHello(incarnation=max(0, replica.incarnation - 1), replica_id=replica.replica_id, pid=1)
                world.handle(LeadSpoke(replica.replica_id, hello.incarnation, hello))
        case _ if agent is not None:
            perform_on_agent(world, operation, number, agent, ref)
        case _:
            pass


def perform_on_agent(world: World, operation: str, number: int, agent: FakeAgent, ref) -> None:
    match operation:
        case "deliver":
            world.deliver(agent)
        case "drop_message" if agent.inbox:
            agent.inbox.popleft()
        case "kill_agent":
            world.kill_agent(agent)
            if number % 2:
                world.handle(NodeGone(agent.node_id, agent.agent_id, "ended"))
        case "partition":
            agent.is_reachable = False
        case "heal":
            agent.is_reachable = True
        case "reregister" if agent.is_reachable:
            world.handle(agent.register())
        case "drain_node":
            world.handle(NodeDrainRequested(agent.node_id, drain=bool(number % 2)))
        case "ready" if ref:
            world.make_ready(agent, ref)
        case "crash" if ref:
            world.exit(agent, ref, signal=9)
        case "user_error" if ref:
            world.exit(agent, ref, code=EXIT_USER_ERROR)
        case "fault" if ref and agent.is_reachable:
            world.lead_says(ref, Fault(incarnation=ref.incarnation, rank=0, step=3, error="x", traceback=""))
        case "drained" if ref and agent.is_reachable:
            world.lead_says(ref, Drained(incarnation=ref.incarnation))
        case "draining" if ref and agent.is_reachable:
            world.lead_says(ref, Draining(incarnation=ref.incarnation))
        case _:
            pass


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1000)), max_size=60))
def test_any_history_keeps_the_invariants_and_ends_well(history) -> None:
    """`World` asserts the invariants at each command; then a healed cluster serves, and a stopped one is empty."""
    world = World(restart=RestartPolicy(retry_s=20.0))
    world.join("n0")
    world.handle(DeploymentApplied(deployment("d0", replicas=2)))
    for operation, number in history:
        perform(world, operation, number)

    for agent in world.agents.values():
        agent.is_reachable = True
    world.join("n9", num_devices=8)
    for node_id in list(world.state.nodes):
        world.handle(NodeDrainRequested(node_id, drain=False))
    for config in list(world.state.deployments.values()):
        world.handle(DeploymentApplied(config))
    world.settle(100)
    wanted = {f"{c.name}-{i}" for c in world.state.deployments.values() for i in range(c.replicas)}
    assert set(world.ready()) == wanted
    running = {ref for agent in world.agents.values() for ref in agent.workers}
    assert {(ref.replica_id, ref.incarnation) for ref in running} == set(world.routes.items())

    world.handle(StopRequested())
    world.settle(50)
    assert world.state.is_stopped and world.routes == {}
    assert not any(agent.workers for agent in world.agents.values())
