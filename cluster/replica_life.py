"""The life of one replica as transitions: what each report, message and passing of time does to its record.

Pure: changes the record it is given and appends commands. Does not choose hosts (`cluster.placement`) nor decide which
replicas there shall be (`cluster.state`, its only caller).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from cluster.adoption import settings_digest
from cluster.commands import (
    Announce,
    AskRoll,
    CloseRoute,
    Command,
    DrainRoute,
    OpenRoute,
    RecordIncarnation,
    SendToAgent,
)
from cluster.config import DeploymentConfig, RestartPolicy, Timeouts
from cluster.messages import HeadToAgent, KillReplica, RunningWorker, StartFailed, StartWorker, StopWorker, WorkerExited
from cluster.placement import RankPlacement
from cluster.records import ALIVE_STATES, NodeRecord, NodeState, RankRecord, ReplicaRecord, ReplicaState, StartProgress
from sonar.messages import LeadReady, Roll
from sonar.process import EXIT_USER_ERROR, describe_exit

# A step that takes so many times what was expected of it hangs.
STEP_MARGIN = 4.0
# Until a lead that has not answered is asked again.
ASK_INTERVAL_S = 1.0
_LOADING_STATES = (ReplicaState.ADOPTING, ReplicaState.STARTING, ReplicaState.LOADING)


@dataclasses.dataclass(frozen=True)
class End:
    """How an incarnation ends.

    Attributes:
        is_failure: counts towards the crash limit. blames_requests: see `CloseRoute`.
        grace_s: SIGTERM first and SIGKILL after so long; None kills at once. dump_stacks: see `KillReplica`.
    """

    reason: str
    is_failure: bool = True
    blames_requests: bool = False
    is_permanent: bool = False
    grace_s: float | None = None
    dump_stacks: bool = False
    log_tail: str = ""
    node_id: str = ""


class ReplicaLife:
    """Transitions over the records of `ClusterState`; owns nothing.

    Args:
        nodes: the state's nodes, for the agents' addresses.
    """

    def __init__(self, nodes: Mapping[str, NodeRecord], timeouts: Timeouts, restart: RestartPolicy) -> None:
        self._nodes = nodes
        self._timeouts = timeouts
        self._hang_s = timeouts.hang_s
        self._restart = restart

    def start(
        self,
        replica: ReplicaRecord,
        placed: Sequence[RankPlacement],
        config: DeploymentConfig,
        out: list[Command],
        now: float,
    ) -> None:
        """PLACING -> STARTING under the incarnation that the record already carries."""
        out.append(RecordIncarnation(replica.replica_id, replica.incarnation))
        replica.ranks = {p.rank: RankRecord(p.node_id, p.devices) for p in placed}
        replica.num_ranks, replica.is_adopted = len(placed), False
        for place in placed:
            self._nodes[place.node_id].assign(replica.worker(place.rank), place.devices)
        replica.progress = StartProgress(phase="spawn", changed_s=now)
        replica.ready, replica.note = None, ""
        replica.enter(ReplicaState.STARTING, now, now + self._timeouts.start_s)
        engine = config.engine_config
        for place in placed:
            parallel = dataclasses.replace(engine.parallel, rank=place.rank)
            message = StartWorker(
                worker=replica.worker(place.rank),
                world_size=len(placed),
                devices=list(place.devices),
                engine=config.engine,
                engine_config=dataclasses.replace(engine, parallel=parallel),
                settings=settings_digest(config),
            )
            self._send(place.node_id, message, out)

    def adopt(
        self, replica: ReplicaRecord, node: NodeRecord, item: RunningWorker, out: list[Command], now: float
    ) -> None:
        """PLACING -> ADOPTING with the first rank that is found to run under an earlier head; then the other ranks."""
        ref = item.worker
        if replica.state is not ReplicaState.ADOPTING:
            replica.incarnation, replica.num_ranks, replica.is_adopted = ref.incarnation, item.world_size, True
            replica.ranks, replica.ready, replica.note = {}, None, ""
            replica.progress = StartProgress(phase="adopt", changed_s=now)
            replica.enter(ReplicaState.ADOPTING, now, now + self._timeouts.adopt_s)
        replica.ranks[ref.rank] = RankRecord(node.node_id, tuple(item.devices), item.pid, item.log_path)
        node.assign(ref, tuple(item.devices))
        node.running.add(ref)
        self.ask_roll(replica, out, now)

    @staticmethod
    def ask_roll(replica: ReplicaRecord, out: list[Command], now: float) -> None:
        """ADOPTING: once all ranks are known to run, the lead is to say what it has."""
        if len(replica.ranks) == replica.num_ranks:
            replica.ask_s = now + ASK_INTERVAL_S
            out.append(AskRoll(replica.replica_id, replica.incarnation))

    def still_loads(self, replica: ReplicaRecord, out: list[Command], now: float) -> None:
        """ADOPTING -> LOADING. Several ranks end: what they told each other went through the earlier head."""
        if replica.num_ranks == 1 and replica.ranks:
            replica.enter(ReplicaState.LOADING, now)
        elif replica.num_ranks > 1:
            self.end(replica, End("its ranks had not met when the head was lost", is_failure=False), out, now)

    def worker_started(self, replica: ReplicaRecord, rank: int, pid: int, log_path: str, now: float) -> None:
        """An agent spawned a rank."""
        record = replica.ranks[rank]
        record.pid, record.log_path = pid, log_path
        self._nodes[record.node_id].running.add(replica.worker(rank))
        replica.progress.changed_s = now
        if replica.state is ReplicaState.STARTING and all(r.pid for r in replica.ranks.values()):
            replica.enter(ReplicaState.LOADING, now)

    def start_failed(self, replica: ReplicaRecord, report: StartFailed, out: list[Command], now: float) -> None:
        """An agent could not spawn a rank."""
        record = self._bury(replica, report.worker.rank)
        reason = f"rank {report.worker.rank} on {record.node_id} did not start: {report.error}"
        self.end(replica, End(reason, is_permanent=report.permanent, node_id=record.node_id), out, now)

    def worker_exited(self, replica: ReplicaRecord, report: WorkerExited, out: list[Command], now: float) -> None:
        """A rank's process has ended; in STOPPING that is what was waited for, in other states it ends the rest."""
        record = self._bury(replica, report.worker.rank)
        is_user_error = report.exit_code == EXIT_USER_ERROR
        if replica.state is ReplicaState.STOPPING:
            replica.failure.is_permanent |= is_user_error
            replica.failure.log_tail = replica.failure.log_tail or report.log_tail
            self._finish_if_dead(replica, out, now)
            return
        code = -report.signal if report.signal else report.exit_code
        is_failure = not report.was_asked and not (replica.state is ReplicaState.DRAINING and code == 0)
        end = End(
            f"rank {report.worker.rank} on {record.node_id} (pid {report.pid}) ended: {describe_exit(code)}",
            is_failure=is_failure,
            blames_requests=is_failure and not is_user_error,
            is_permanent=is_user_error,
            log_tail=report.log_tail,
            node_id=record.node_id,
        )
        self.end(replica, end, out, now)

    def ranks_lost(
        self, replica: ReplicaRecord, numbers: Iterable[int], end: End, out: list[Command], now: float
    ) -> None:
        """Ranks that went without a report (their host is gone, say) are taken for dead, and with them the rest."""
        for number in numbers:
            self._bury(replica, number)
        if replica.state in ALIVE_STATES:
            self.end(replica, end, out, now)
        elif replica.state is ReplicaState.STOPPING:
            self._finish_if_dead(replica, out, now)

    def became_ready(
        self, replica: ReplicaRecord, ready: LeadReady, out: list[Command], now: float, roll: Roll | None = None
    ) -> None:
        """LOADING or ADOPTING -> READY."""
        seconds = now - replica.since_s
        replica.ready, replica.news_s, replica.was_ready, replica.is_routed = ready, now, True, True
        replica.step_expected_s = 0.0
        replica.max_model_len = ready.max_model_len
        replica.enter(ReplicaState.READY, now)
        out.append(OpenRoute(replica.replica_id, replica.incarnation, replica.deployment, ready, roll))
        if roll is not None:
            text = f"{_title(replica)} is taken over as it runs, with {len(roll.requests)} requests"
        else:
            text = f"{_title(replica)} is ready, loaded in {seconds:.1f} s"
        out.append(Announce(text, is_failure=False))
        out.extend(Announce(f"{replica.replica_id}: {notice}", is_failure=True) for notice in ready.notices)

    def drain(self, replica: ReplicaRecord, out: list[Command], now: float, *, ask_lead: bool) -> None:
        """READY -> DRAINING."""
        replica.enter(ReplicaState.DRAINING, now, now + self._timeouts.drain_s)
        out.append(DrainRoute(replica.replica_id, replica.incarnation, ask_lead))

    def move_away(self, replica: ReplicaRecord, node_id: str, out: list[Command], now: float) -> None:
        """A host of its ranks takes no work any more: it finishes what it has, and is then started elsewhere."""
        if replica.state is ReplicaState.READY:
            self.drain(replica, out, now, ask_lead=True)
        elif replica.state in _LOADING_STATES:
            self.end(replica, End(f"node {node_id} takes no work any more", is_failure=False), out, now)

    def request_stop(self, replica: ReplicaRecord, out: list[Command], now: float) -> None:
        """It shall not run any more, and drains if there is something to drain."""
        replica.is_wanted = False
        if replica.state is ReplicaState.READY:
            self.drain(replica, out, now, ask_lead=True)
        elif replica.state in _LOADING_STATES:
            self.end(replica, End("stopped while loading", is_failure=False), out, now)
        elif replica.state not in (ReplicaState.DRAINING, ReplicaState.STOPPING):
            replica.enter(ReplicaState.STOPPED, now)

    @staticmethod
    def excuse(replica: ReplicaRecord, now: float) -> None:
        """Its failures were not its own: the count begins anew, a wait for the next start is over."""
        replica.failure.count = 0
        replica.failure.by_node.clear()
        if replica.state is ReplicaState.BACKOFF:
            replica.due_s = now

    def tick(self, replica: ReplicaRecord, out: list[Command], now: float) -> None:
        """Deadlines of the present state."""
        if replica.state is ReplicaState.READY and not replica.failure.count and not self._is_hung(replica, now):
            return  # nearly all of them, nearly always
        waited_s = now - replica.since_s
        match replica.state:
            case ReplicaState.ADOPTING if now >= replica.due_s:
                missing = [number for number in range(replica.num_ranks) if number not in replica.ranks]
                what = f"ranks {missing} were not found" if missing else "its lead did not say what it has"
                end = End(f"{what} within {waited_s:.0f} s of the head's start", is_failure=False)
                self.end(replica, end, out, now)
            case ReplicaState.ADOPTING if now >= replica.ask_s:
                self.ask_roll(replica, out, now)
            case ReplicaState.STARTING if now >= replica.due_s:
                missing = [number for number, rank in replica.ranks.items() if not rank.pid]
                self.end(replica, End(f"ranks {missing} were not spawned within {waited_s:.0f} s"), out, now)
            case ReplicaState.LOADING if now - replica.progress.changed_s >= self._timeouts.load_stall_s:
                progress = replica.progress
                stalled_s = now - progress.changed_s
                reason = (
                    f"no progress for {stalled_s:.0f} s in phase {progress.phase!r} ({progress.done}/{progress.total})"
                )
                self.end(replica, End(reason, dump_stacks=True), out, now)
            case ReplicaState.READY | ReplicaState.DRAINING if self._is_hung(replica, now):
                reason = f"no sign of life from the engine loop for {now - replica.news_s:.0f} s"
                if replica.step_expected_s:
                    reason += f", in a step that was expected to take {replica.step_expected_s:.1f} s"
                self.end(replica, End(reason, blames_requests=True, dump_stacks=True), out, now)
            case ReplicaState.DRAINING if now >= replica.due_s:
                self.end(replica, End(f"still busy after draining for {waited_s:.0f} s", is_failure=False), out, now)
            case ReplicaState.READY if waited_s >= self._restart.stable_s:
                replica.failure.count = 0
                replica.failure.by_node.clear()
            case ReplicaState.STOPPING if now >= replica.due_s:
                self._give_up_waiting(replica, out, now)
            case ReplicaState.BACKOFF | ReplicaState.FAILED if now >= replica.due_s:
                replica.enter(ReplicaState.PLACING, now)
            case _:
                pass

    def _is_hung(self, replica: ReplicaRecord, now: float) -> bool:
        """Whether it has been silent for longer than what it computes explains."""
        return now - replica.news_s >= max(self._hang_s, STEP_MARGIN * replica.step_expected_s)

    def end(self, replica: ReplicaRecord, end: End, out: list[Command], now: float) -> None:
        """Any living state -> STOPPING: closes the route, ends every rank, remembers why."""
        assert replica.state in ALIVE_STATES, (replica.replica_id, replica.state)
        if replica.is_routed:
            replica.is_routed = False
            out.append(CloseRoute(replica.replica_id, replica.incarnation, end.blames_requests, end.reason))
        failure = replica.failure
        failure.reason, failure.log_tail, failure.is_permanent = end.reason, end.log_tail, end.is_permanent
        if end.is_failure:
            failure.count += 1
            if end.node_id:
                failure.by_node[end.node_id] = failure.by_node.get(end.node_id, 0) + 1
        out.append(Announce(f"{_title(replica)} is over: {end.reason}", is_failure=end.is_failure))
        self._end_ranks(replica, end, out)
        replica.enter(ReplicaState.STOPPING, now, now + (end.grace_s or 0.0) + self._timeouts.fence_s)
        self._finish_if_dead(replica, out, now)

    def _bury(self, replica: ReplicaRecord, number: int) -> RankRecord:
        """The rank counts as dead from here on."""
        record = replica.ranks[number]
        record.is_alive = False
        node = self._nodes.get(record.node_id)
        if node is not None:
            node.release(replica.worker(number))
        return record

    def _end_ranks(self, replica: ReplicaRecord, end: End, out: list[Command]) -> None:
        alive = replica.alive_ranks()
        if end.grace_s is not None:
            for number, rank in alive:
                self._send(rank.node_id, StopWorker(worker=replica.worker(number), grace_s=end.grace_s), out)
            return
        for node_id in sorted({rank.node_id for _, rank in alive}):
            kill = KillReplica(
                replica_id=replica.replica_id, incarnation=replica.incarnation, dump_stacks=end.dump_stacks
            )
            self._send(node_id, kill, out)

    def _give_up_waiting(self, replica: ReplicaRecord, out: list[Command], now: float) -> None:
        """The fence deadline passed: go on without the exit reports, and keep off the devices they may still hold."""
        for number, rank in replica.alive_ranks():
            self._bury(replica, number)
            node = self._nodes.get(rank.node_id)
            if node is not None:
                node.hold(replica.worker(number), rank.devices)
            text = f"{_title(replica)}: exit of rank {number} on {rank.node_id} (pid {rank.pid}) was not reported"
            out.append(Announce(text, is_failure=True))
        self._finish_if_dead(replica, out, now)

    def _finish_if_dead(self, replica: ReplicaRecord, out: list[Command], now: float) -> None:
        """STOPPING -> what follows, once no rank lives."""
        if replica.alive_ranks():
            return
        failure, policy = replica.failure, self._restart
        replica.ranks = {}
        if not replica.is_wanted:
            replica.enter(ReplicaState.STOPPED, now)
        elif failure.is_permanent or failure.count >= policy.crash_limit:
            retries = policy.retry_s > 0 and not failure.is_permanent
            replica.enter(ReplicaState.FAILED, now, now + policy.retry_s if retries else math.inf)
            if not failure.is_permanent:  # of that one try, `end` has told
                text = f"{replica.replica_id} failed {failure.count} times in a row: {failure.reason}"
                out.append(Announce(text, is_failure=True))
        else:
            delay_s = policy.delay_s(failure.count)
            replica.enter(ReplicaState.BACKOFF, now, now + delay_s)

    def _send(self, node_id: str, message: HeadToAgent, out: list[Command]) -> None:
        node = self._nodes.get(node_id)
        if node is not None and node.state is NodeState.UP:
            out.append(SendToAgent(node_id, node.agent_id, message))


def _title(replica: ReplicaRecord) -> str:
    return f"{replica.replica_id} incarnation {replica.incarnation}"
