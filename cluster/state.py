"""The cluster as a pure state machine: `handle(event, now)` returns what is to be done. No socket, process or clock.

Owns membership: nodes, deployments, replicas. Each replica's transitions are in `cluster.replica_life`, the choice of
hosts in `cluster.placement`. Does not see requests or tokens. Called by the head's shell, by the simulator, and by
tests that feed it years of faults in a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import assert_never

from cluster.adoption import AdoptionWindow, is_adoptable
from cluster.commands import Announce, Command, ResyncRoute, SendToAgent
from cluster.config import DeploymentConfig, NodesConfig, RestartPolicy, Timeouts
from cluster.events import (
    AgentReported,
    AgentSpoke,
    DeploymentApplied,
    DeploymentRemoved,
    Event,
    FailureExplained,
    LeadSpoke,
    NodeDrainRequested,
    NodeGone,
    NodeLeaving,
    NodeRegistered,
    PeersReached,
    ProbeRequested,
    RestartRequested,
    StopRequested,
    Tick,
)
from cluster.messages import (
    KillReplica,
    ProbePeers,
    Refused,
    Register,
    RegisterAgain,
    Registered,
    RunningWorker,
    StartFailed,
    WorkerExited,
    WorkerRef,
    WorkerStarted,
)
from cluster.placement import Unplaceable, place_replica
from cluster.records import ALIVE_STATES, IncarnationNumbers, NodeRecord, NodeState, ReplicaRecord, ReplicaState
from cluster.replica_life import End, ReplicaLife
from cluster.roll_call import RollCall
from cluster.rolling_restart import mark_for_restart, next_to_restart
from sonar.messages import Drained, Draining, Fault, LeadHello, LeadReady, LeadStats, LoadProgress, Roll, StepAhead
from sonar.transport import PROTOCOL_VERSION

# A gap between ticks above this means that the head itself did not run (a stopped or starved process): the silence it
# finds is its own, and no peer is to be declared lost for it.
TICK_GAP_S = 1.0
LOST_NODE_KEPT_S = 900.0
FAULT_GRACE_S = 2.0


class ClusterState:
    """Owner of nodes, deployments and replicas.

    Args:
        versions: this head's; an agent with another "sonar" is refused by name.
        incarnation_floor: an earlier head may have given any number up to it, to any replica.
        nodes: hosts to wait for before anything is placed.
        nodes_before: hosts that had workers under an earlier head; they are waited for likewise, to take those over.

    """

    def __init__(
        self,
        timeouts: Timeouts,
        restart: RestartPolicy,
        versions: Mapping[str, str],
        incarnation_floor: int,
        nodes: NodesConfig = NodesConfig(),  # noqa: B008 - frozen
        nodes_before: Collection[str] = (),
    ) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.deployments: dict[str, DeploymentConfig] = {}
        self.replicas: dict[str, ReplicaRecord] = {}
        self.is_stopping = False
        self.roll_call = RollCall(nodes)
        self.adoption = AdoptionWindow(nodes_before, timeouts.adopt_s)
        self._timeouts = timeouts
        self._versions = dict(versions)
        self.incarnations = IncarnationNumbers(incarnation_floor)
        self._pending: dict[str, ReplicaRecord] = {}
        self._life = ReplicaLife(self.nodes, timeouts, restart)
        self._last_tick_s: float | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether everything has ended after `StopRequested`."""
        return self.is_stopping and not self.replicas

    @property
    def is_adopting(self) -> bool:
        """Whether workers of an earlier head may run that do not serve this one yet."""
        return not self.adoption.is_over or any(r.state is ReplicaState.ADOPTING for r in self.replicas.values())

    @property
    def nodes_with_workers(self) -> list[str]:
        """Hosts where ranks were placed that are not known to have ended."""
        return [node.node_id for node in self.nodes.values() if node.assigned]

    def is_current(self, replica_id: str, incarnation: int) -> bool:
        """Whether messages of that incarnation are to be listened to."""
        replica = self.replicas.get(replica_id)
        return replica is not None and replica.incarnation == incarnation and replica.state in ALIVE_STATES

    def has_ended(self, replica_id: str, incarnation: int) -> bool:
        """Whether the processes of an incarnation are known, or after their deadline taken, to have ended."""
        replica = self.replicas.get(replica_id)
        return replica is None or replica.incarnation != incarnation or not replica.alive_ranks()

    def handle(self, event: Event, now: float) -> list[Command]:
        """Takes one event in; returns commands in the order they are to be carried out. `now` never goes back."""
        out: list[Command] = []
        match event:
            case AgentSpoke():
                self._agent_spoke(event, out, now)
                return out
            case LeadSpoke():
                self._lead_spoke(event, out, now)
                if isinstance(event.message, LeadHello | LeadReady | LeadStats | LoadProgress | StepAhead):
                    return out  # the frequent ones change nothing that has to be settled
            case AgentReported():
                self._agent_reported(event, out, now)
                if isinstance(event.report, WorkerStarted):
                    return out
            case Tick():
                self._tick(out, now)
            case NodeRegistered():
                self._node_registered(event, out, now)
            case NodeGone():
                node = self.nodes.get(event.node_id)
                if node is not None and event.agent_id in (None, node.agent_id):
                    self._lose_node(node, event.reason, out, now)
            case DeploymentApplied():
                self.deployments[event.config.name] = event.config
                self._set_wanted(event.config.name, event.config.num_replicas, out, now)
            case DeploymentRemoved():
                self.deployments.pop(event.name, None)
                self._set_wanted(event.name, 0, out, now)
            case RestartRequested():
                names = mark_for_restart(r for r in self.replicas.values() if r.deployment == event.deployment)
                text = f"restarting one after the other: {', '.join(names) or 'none serves'}"
                out.append(Announce(text, is_failure=False))
            case FailureExplained():
                replica = self.replicas.get(event.replica_id)
                if replica is not None:
                    self._life.excuse(replica, now)
            case NodeDrainRequested():
                node = self.nodes.get(event.node_id)
                if node is not None:
                    node.is_drained = event.drain
                    self._vacate(node, out, now)
            case NodeLeaving():
                node = self.nodes.get(event.node_id)
                if node is not None and node.agent_id == event.agent_id:
                    node.is_leaving = True
                    out.append(Announce(f"node {node.node_id} is leaving", is_failure=False))
                    self._vacate(node, out, now)
            case ProbeRequested():
                self._probe(event.number, out)
            case PeersReached():
                node = self.nodes.get(event.node_id)
                if node is not None and node.agent_id == event.agent_id:
                    node.probe_number, node.reach = event.number, event.seconds
            case StopRequested():
                self.is_stopping = True
                for replica in self.replicas.values():
                    self._life.request_stop(replica, out, now)
            case _:
                assert_never(event)
        self._settle(out, now)
        return out

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _node_registered(self, event: NodeRegistered, out: list[Command], now: float) -> None:
        register, agent_id = event.register, event.agent_id
        node_id = register.node_id
        refusal = self._refusal(event)
        if refusal:
            out.append(SendToAgent(node_id, agent_id, Refused(reason=refusal)))
            out.append(Announce(f"refused node {node_id}: {refusal}", is_failure=True))
            return
        old = self.nodes.get(node_id)
        if old is not None and old.agent_id != agent_id:
            out.append(SendToAgent(node_id, old.agent_id, Refused(reason="another agent of this node took over")))
        node = NodeRecord(node_id, agent_id, register.hardware, register.versions, now, now)
        node.clock_skew_s = event.skew_s
        if old is not None:
            node.is_drained, node.assigned = old.is_drained, old.assigned
        self.nodes[node_id] = node
        times = self._timeouts
        registered = Registered(heartbeat_interval_s=times.heartbeat_interval_s, head_loss_s=times.head_loss_s)
        out.append(SendToAgent(node_id, agent_id, registered))
        if old is None or old.state is NodeState.LOST or old.agent_id != agent_id:
            out.append(Announce(f"node {node_id} joined", is_failure=False))
        self._compare_workers(node, register, old is not None and old.agent_id == agent_id, out, now)

    def _refusal(self, event: NodeRegistered) -> str:
        """Why an agent may not join; empty when it may."""
        register = event.register
        if register.protocol != PROTOCOL_VERSION:
            return f"protocol {register.protocol} there, {PROTOCOL_VERSION} here: install the same Sonar on both"
        theirs, ours = register.versions.get("sonar", "?"), self._versions.get("sonar", "?")
        if theirs != ours:
            return f"Sonar {theirs} there, {ours} here: install the same version on both"
        old = self.nodes.get(register.node_id)
        if self.is_stopping and (old is None or old.agent_id != event.agent_id):
            return "the head is stopping"
        if (
            old is not None
            and old.agent_id != event.agent_id
            and old.state is NodeState.UP
            and old.hardware.boot_id != register.hardware.boot_id
        ):
            return (
                f"another host ({old.hardware.hostname}) is the node {register.node_id}: give this one another node id"
            )
        return ""

    def _compare_workers(
        self, node: NodeRecord, register: Register, is_same_agent: bool, out: list[Command], now: float
    ) -> None:
        """What lives on the host against what should: what an earlier head started is taken over if it is wanted as it
        is, other strangers are killed, missing ranks are dead."""
        running = {item.worker: item for item in register.running}
        for ref, item in running.items():
            if self._runs_on(ref, node.node_id):
                self._life.worker_started(self.replicas[ref.replica_id], ref.rank, item.pid, item.log_path, now)
            elif self._is_adoptable(node, item):
                self._life.adopt(self.replicas[ref.replica_id], node, item, out, now)
            else:
                node.hold(ref, tuple(item.devices))
                self._kill_stale(node, ref, out)
        for replica, numbers in self._assigned(node):
            missing = [
                number
                for number in numbers
                if replica.worker(number) not in running
                and not (is_same_agent and not replica.ranks[number].pid)  # its StartWorker may be on the way
            ]
            if missing:
                end = End(f"ranks {missing} are not on {node.node_id} any more", is_failure=False)
                self._life.ranks_lost(replica, missing, end, out, now)

    def _is_adoptable(self, node: NodeRecord, item: RunningWorker) -> bool:
        replica = self.replicas.get(item.worker.replica_id)
        if replica is None or self.is_stopping or replica.deployment not in self.deployments:
            return False
        return is_adoptable(replica, item, self.deployments[replica.deployment], self.incarnations, node.view)

    def _agent_spoke(self, event: AgentSpoke, out: list[Command], now: float) -> None:
        node = self.nodes.get(event.node_id)
        if node is not None and node.agent_id == event.agent_id and node.state is NodeState.UP:
            node.agent_seen_s = node.seen_s = now
            if node.running | node.held.keys() == set(event.running):
                return
        out.append(SendToAgent(event.node_id, event.agent_id, RegisterAgain()))

    def _runs_on(self, ref: WorkerRef, node_id: str) -> bool:
        """Whether that worker is thought to live there."""
        replica = self.replicas.get(ref.replica_id)
        rank = replica.ranks.get(ref.rank) if replica and replica.incarnation == ref.incarnation else None
        return rank is not None and rank.node_id == node_id and rank.is_alive

    def _agent_reported(self, event: AgentReported, out: list[Command], now: float) -> None:
        node = self.nodes.get(event.node_id)
        if node is None or node.agent_id != event.agent_id or node.state is not NodeState.UP:
            return  # it will register (again) and say then what runs
        node.agent_seen_s = node.seen_s = now
        report, ref = event.report, event.report.worker
        replica = self.replicas.get(ref.replica_id)
        if replica is None or not self._runs_on(ref, node.node_id):
            if isinstance(report, WorkerStarted):
                self._kill_stale(node, ref, out)
            else:
                node.release(ref)
            return
        match report:
            case WorkerStarted():
                self._life.worker_started(replica, ref.rank, report.pid, report.log_path, now)
            case StartFailed() if replica.state in ALIVE_STATES:
                self._life.start_failed(replica, report, out, now)
            case StartFailed():
                gone = WorkerExited(worker=ref, pid=0, exit_code=0, signal=0, log_tail=report.error, was_asked=True)
                self._life.worker_exited(replica, gone, out, now)
            case WorkerExited():
                self._life.worker_exited(replica, report, out, now)
            case _:
                assert_never(report)

    @staticmethod
    def _kill_stale(node: NodeRecord, ref: WorkerRef, out: list[Command]) -> None:
        kill = KillReplica(replica_id=ref.replica_id, incarnation=ref.incarnation)
        out.append(SendToAgent(node.node_id, node.agent_id, kill))

    def _lose_node(self, node: NodeRecord, reason: str, out: list[Command], now: float) -> None:
        if node.state is NodeState.LOST:
            return
        node.state, node.note, node.seen_s = NodeState.LOST, reason, now
        for ref in list(node.held):
            node.release(ref)
        out.append(Announce(f"node {node.node_id} is lost: {reason}", is_failure=not self.is_stopping))
        for replica, lost in self._assigned(node):
            end = End(f"node {node.node_id}: {reason}", is_failure=False)
            self._life.ranks_lost(replica, lost, end, out, now)

    def _probe(self, number: int, out: list[Command]) -> None:
        """Has every node try every other one; a node alone has nobody to try."""
        addresses = {n.node_id: n.hardware.address for n in self.nodes.values() if n.state is NodeState.UP}
        for node_id in addresses:
            peers = {name: address for name, address in addresses.items() if name != node_id and address}
            probe = ProbePeers(number=number, peers=peers)
            out.append(SendToAgent(node_id, self.nodes[node_id].agent_id, probe))

    def _vacate(self, node: NodeRecord, out: list[Command], now: float) -> None:
        """What runs on a node that takes no work drains, or ends if it does not serve yet."""
        if node.takes_work:
            return
        for replica, _ in self._assigned(node):
            self._life.move_away(replica, node.node_id, out, now)

    def _assigned(self, node: NodeRecord) -> list[tuple[ReplicaRecord, list[int]]]:
        """Replicas with ranks on a node that are not known to have ended, and those ranks."""
        found: dict[str, list[int]] = {}
        for ref in node.assigned:
            found.setdefault(ref.replica_id, []).append(ref.rank)
        return [(self.replicas[replica_id], numbers) for replica_id, numbers in found.items()]

    # --- replicas ---------------------------------------------------------------------------------------------------

    def _lead_spoke(self, event: LeadSpoke, out: list[Command], now: float) -> None:
        replica = self.replicas.get(event.replica_id)
        if replica is None or not self.is_current(event.replica_id, event.incarnation):
            return
        lead = replica.ranks.get(0)
        if lead is None:
            return  # of an adopted replica, and its agent has not said yet that it runs
        node = self.nodes[lead.node_id]
        node.seen_s, replica.news_s = now, now
        is_adopting = replica.state is ReplicaState.ADOPTING
        is_serving = replica.state in (ReplicaState.READY, ReplicaState.DRAINING)
        match event.message:
            case LeadHello():
                replica.progress.changed_s = now
                if is_serving:
                    out.append(ResyncRoute(replica.replica_id, replica.incarnation))
                elif is_adopting:
                    self._life.ask_roll(replica, out, now)
            case LoadProgress(phase=phase, done=done, total=total):
                progress = replica.progress
                if (progress.phase, progress.done, progress.total) != (phase, done, total):
                    progress.phase, progress.done, progress.total, progress.changed_s = phase, done, total, now
                if is_adopting:
                    self._life.still_loads(replica, out, now)
            case LeadReady():
                if not is_serving and not is_adopting:
                    self._life.became_ready(replica, event.message, out, now)
                    if replica.is_adopted:  # it may have become ready under the earlier head, and have its requests
                        out.append(ResyncRoute(replica.replica_id, replica.incarnation))
            case Roll():
                if is_adopting and len(replica.ranks) == replica.num_ranks:
                    self._life.became_ready(replica, event.message.ready, out, now, event.message)
            case LeadStats():
                replica.step_expected_s = 0.0
            case StepAhead(expected_s=expected_s):
                replica.step_expected_s = expected_s
            case Fault(rank=rank) as fault:
                faulty = replica.ranks.get(rank, replica.ranks[0]).node_id
                reason = fault_reason(fault, len(replica.ranks), faulty)
                # The other ranks wait for this one in a collective that nothing but a kill ends.
                grace_s = FAULT_GRACE_S if len(replica.ranks) == 1 else None
                is_mistake = fault.is_user_error
                end = End(
                    reason, blames_requests=not is_mistake, is_permanent=is_mistake, grace_s=grace_s, node_id=faulty
                )
                self._life.end(replica, end, out, now)
            case Draining():
                if replica.state is ReplicaState.READY:
                    self._life.drain(replica, out, now, ask_lead=False)
                elif is_adopting:
                    end = End("draining", is_failure=False, grace_s=self._timeouts.kill_grace_s)
                    self._life.end(replica, end, out, now)
            case Drained():
                self._life.end(replica, End("drained", is_failure=False, grace_s=self._timeouts.kill_grace_s), out, now)
            case _:
                assert_never(event.message)

    def _set_wanted(self, deployment: str, count: int, out: list[Command], now: float) -> None:
        """Replicas 0..count-1 of a deployment shall run, no others."""
        for index in range(count if not self.is_stopping else 0):
            replica_id = f"{deployment}-{index}"
            replica = self.replicas.get(replica_id)
            if replica is None:
                last = self.incarnations.latest(replica_id)
                replica = ReplicaRecord(replica_id, deployment, self._pending, incarnation=last, since_s=now)
                self.replicas[replica_id] = replica
            replica.is_wanted = True
            if replica.state in (ReplicaState.FAILED, ReplicaState.STOPPED):
                replica.failure.count = 0
                replica.enter(ReplicaState.PLACING, now)
        names = {f"{deployment}-{index}" for index in range(count)}
        for replica in self.replicas.values():
            if replica.deployment == deployment and replica.replica_id not in names:
                self._life.request_stop(replica, out, now)

    @property
    def nodes_here(self) -> list[str]:
        """Ids of the nodes that are up."""
        return [node.node_id for node in self.nodes.values() if node.state is NodeState.UP]

    def _tick(self, out: list[Command], now: float) -> None:
        gap_s = 0.0 if self._last_tick_s is None else now - self._last_tick_s
        self._last_tick_s = now
        if gap_s > TICK_GAP_S:
            self._forgive(gap_s, now)
        for node in list(self.nodes.values()):
            silent_s = now - node.seen_s
            if node.state is NodeState.UP and silent_s >= self._timeouts.heartbeat_timeout_s:
                self._lose_node(node, f"silent for {silent_s:.1f} s", out, now)
            elif node.state is NodeState.LOST and silent_s >= LOST_NODE_KEPT_S:
                del self.nodes[node.node_id]
            elif node.held and now >= node.kill_again_s:
                node.kill_again_s = now + self._timeouts.fence_s
                for ref in node.held:
                    self._kill_stale(node, ref, out)
        for replica in self.replicas.values():
            self._life.tick(replica, out, now)
        for replica in next_to_restart(self.replicas.values()) if not self.is_stopping else ():
            self._life.drain(replica, out, now, ask_lead=True)

    def _forgive(self, gap_s: float, now: float) -> None:
        """The head was away for gap_s: nobody is to blame for not having been heard in that time."""
        for node in self.nodes.values():
            node.agent_seen_s = min(now, node.agent_seen_s + gap_s)
            node.seen_s = min(now, node.seen_s + gap_s)
        for replica in self.replicas.values():
            replica.news_s = min(now, replica.news_s + gap_s)
            replica.progress.changed_s = min(now, replica.progress.changed_s + gap_s)
            if replica.state in (ReplicaState.ADOPTING, ReplicaState.STARTING, ReplicaState.STOPPING):
                replica.due_s += gap_s

    def _settle(self, out: list[Command], now: float) -> None:
        """After an event: forget what has stopped, start what waits for nothing but room."""
        if not self.roll_call.is_over and (news := self.roll_call.tick(self.nodes_here, now)):
            out.append(Announce(news, is_failure=bool(self.roll_call.failure)))
        if not self.adoption.is_over and (news := self.adoption.tick(self.nodes_here, now)):
            out.append(Announce(news, is_failure=True))
        waiting: list[ReplicaRecord] = []
        for replica in list(self._pending.values()):
            if replica.state is ReplicaState.STOPPED:
                del self.replicas[replica.replica_id], self._pending[replica.replica_id]
            elif replica.state is ReplicaState.BACKOFF and now >= replica.due_s:
                replica.enter(ReplicaState.PLACING, now)
            if replica.state is ReplicaState.PLACING:
                waiting.append(replica)
        if waiting and self.roll_call.is_over and self.adoption.is_over:
            self._place(waiting, out, now)
        elif waiting:
            wait = self.roll_call if not self.roll_call.is_over else self.adoption
            note = wait.note(self.nodes_here)
            for replica in waiting:
                replica.note = note

    def _place(self, waiting: list[ReplicaRecord], out: list[Command], now: float) -> None:
        timeout_s = self._timeouts.heartbeat_timeout_s
        # A lead's word alone does not spawn anything: the agent has to be awake.
        awake = [node for node in self.nodes.values() if node.takes_work and now - node.agent_seen_s < timeout_s]
        views = {node.node_id: node.view for node in awake}
        no_room: dict[str, str] = {}
        for replica in waiting:
            if replica.deployment in no_room:
                replica.note = no_room[replica.deployment]
                continue
            incarnation = self.incarnations.latest(replica.replica_id) + 1
            if incarnation > self.incarnations.limit:
                replica.note = f"incarnation {incarnation} waits for the head's store, which does not answer"
                continue
            config = self.deployments[replica.deployment]
            parallel, device = config.engine_config.parallel, config.engine_config.device
            need = (parallel.world_size, parallel.tp_size, device)
            limit = config.ranks_per_host
            placed = place_replica(*need, list(views.values()), replica.failure.by_node, limit)
            if isinstance(placed, Unplaceable):
                if views and not replica.note.startswith(placed.reason):
                    out.append(Announce(f"{replica.replica_id} has no place: {placed.reason}", is_failure=True))
                no_room[replica.deployment] = replica.note = placed.text
                continue
            replica.incarnation = self.incarnations.given[replica.replica_id] = incarnation
            self._life.start(replica, placed, config, out, now)
            views |= {place.node_id: self.nodes[place.node_id].view for place in placed}


def fault_reason(fault: Fault, num_ranks: int, node_id: str) -> str:
    """A rank's fault in one line: where and when, except where the text alone says why a start failed."""
    if fault.is_user_error or (fault.step < 0 and num_ranks == 1):
        return fault.error
    if fault.step < 0:
        return f"rank {fault.rank} on {node_id} faulted before its first step: {fault.error}"
    return f"rank {fault.rank} faulted after step {fault.step}: {fault.error}"


def is_new_settings(old: DeploymentConfig | None, new: DeploymentConfig) -> bool:
    """Whether applying `new` over `old` changes more than the number of replicas."""
    return old is not None and dataclasses.replace(old, replicas=new.replicas) != new
