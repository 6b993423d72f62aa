"""The control plane's shell: messages in become events, commands become messages, routes, and words in the log.

Owns `ClusterState` and drives it; hands tokens to the request table without a detour. Runs in the head's loop, never
waits. Does not know HTTP or processes. Made by the head.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, assert_never

import msgspec

from cluster.commands import (
    Announce,
    AskRoll,
    CloseRoute,
    Command,
    DrainRoute,
    OpenRoute,
    RecordIncarnation,
    ResyncRoute,
    SendToAgent,
)
from cluster.config import ClusterConfig
from cluster.events import (
    AgentReported,
    AgentSpoke,
    DeploymentApplied,
    DeploymentRemoved,
    Event,
    FailureExplained,
    LeadSpoke,
    NodeGone,
    NodeLeaving,
    NodeRegistered,
    PeersReached,
    StopRequested,
    Tick,
)
from cluster.incarnations import IncarnationCeiling
from cluster.journal import MemoryJournal
from cluster.journal_mirror import JournalMirror
from cluster.messages import (
    AgentToHead,
    Heartbeat,
    Leaving,
    PeersProbed,
    Register,
    Shutdown,
    StartFailed,
    WantsToLeave,
    WorkerExited,
    WorkerStarted,
)
from cluster.operators import OperatorDesk
from cluster.peer_relay import PeerRelay
from cluster.preflight import joining_findings
from cluster.records import ReplicaState
from cluster.rendezvous import Rendezvous
from cluster.requests import RequestTable
from cluster.roster import Roster
from cluster.state import ClusterState
from cluster.status import ClusterStatus, cluster_status, node_status
from cluster.store.contract import Store
from sonar.messages import (
    Drain,
    Fault,
    HeadToLead,
    KVEvents,
    LeadStats,
    LeadToHead,
    Pong,
    RankToHead,
    Roll,
    TakeRoll,
    Tokens,
    ToPeer,
)
from sonar.transport import DropReason, PeerId, PeerKind, TransportCounters
from sonar.transport_server import MessageHandler

logger = logging.getLogger(__name__)


class ControlLink(Protocol):
    """The links to agents and leads; `sonar.transport_server.Server` is one, bound and not yet open."""

    @property
    def counters(self) -> TransportCounters:
        """What it has seen."""
        ...

    def open(self, handler: MessageHandler) -> None:
        """Begins to hand messages over."""
        ...

    def send(self, peer: PeerId, message: msgspec.Struct) -> bool:
        """False when it could not be sent at all."""
        ...


class ControlPlane:
    """Owner of the cluster's state and of the open requests.

    Args:
        clock: monotonic seconds.
        epoch: number of this head; above that of every earlier one.

    Attributes:
        mirror: for heads that stand by; None where there can be none.
    """

    def __init__(
        self,
        config: ClusterConfig,
        server: ControlLink,
        store: Store,
        versions: Mapping[str, str],
        clock: Callable[[], float],
        epoch: int = 0,
    ) -> None:
        self.incarnations, self.roster = IncarnationCeiling(store), Roster(store)
        self.server = server
        self.mirror: JournalMirror | None = None
        self.state = ClusterState(
            config.timeouts, config.restart, versions, self.incarnations.floor, config.nodes, self.roster.earlier
        )
        self.state.incarnations.limit = self.incarnations.ceiling
        self.table = RequestTable(MemoryJournal(epoch), self, clock)
        if self.state.is_adopting:
            self.table.recovery.has_begun = True
        self.rendezvous = Rendezvous()
        self.peers = PeerRelay(self, self.state)
        self._operators = OperatorDesk(self.state, self.feed, self.status, versions, self.table.timelines)
        self._clock = clock
        self._versions = versions
        self._next_table_tick_s = 0.0

    def open(self) -> None:
        """Begins to listen to peers, in the running loop."""
        self.server.open(self.on_message)

    def status(self) -> ClusterStatus:
        """A snapshot of now."""
        return cluster_status(self.state, self.table, self._clock())

    def feed(self, event: Event) -> None:
        """Something happened; what follows is done at once, and after it what follows from that."""
        events: deque[Event] = deque([event])
        while events:
            for command in self.state.handle(events.popleft(), self._clock()):
                events.extend(self._execute(command))
        if isinstance(event, DeploymentApplied | DeploymentRemoved):
            self.table.set_deployments(self.state.deployments.values())

    def guarded_tick(self) -> None:
        """`tick`; an error in it is counted and told, and must not end the head and with it every stream."""
        try:
            self.tick()
        except Exception:
            self._drop(DropReason.FAILED)
            if self.server.counters.dropped[DropReason.FAILED].bit_count() == 1:
                logger.exception("the tick failed")

    def tick(self) -> None:
        """Several times a second."""
        self.state.incarnations.limit = self.incarnations.ceiling
        self.feed(Tick())
        self.peers.tick()
        now = self._clock()
        for replica_id, incarnation, reply in self.rendezvous.tick(now):
            self.server.send(PeerId(PeerKind.RANK, f"{replica_id}/{reply.rank}", incarnation), reply.message)
        if self.table.recovery.has_begun and not self.state.is_adopting:
            self.table.end_recovery()
        if now >= self._next_table_tick_s:
            self._next_table_tick_s = now + 1.0
            self.table.tick()
            self._fail_hopeless()

    def begin_stop(self) -> None:
        """New requests are refused, open ones finish, replicas drain."""
        self.table.close_to_new()
        self.feed(StopRequested())
        self._fail_hopeless()

    def shut_down_node(self, node_id: str, grace_s: float) -> bool:
        """Tells a node's agent to end its workers and itself; False when it cannot be told."""
        node = self.state.nodes.get(node_id)
        peer = PeerId(PeerKind.AGENT, node_id, node.agent_id if node is not None else 0)
        return self.server.send(peer, Shutdown(grace_s=grace_s))

    def send_to_lead(self, replica_id: str, incarnation: int, message: HeadToLead) -> bool:
        """See `cluster.dispatcher.LeadLink`."""
        return self.server.send(PeerId(PeerKind.LEAD, replica_id, incarnation), message)

    def on_message(self, peer: PeerId, message: Any) -> None:
        """From the transport: any message of any peer."""
        if peer.kind is PeerKind.AGENT:
            self._from_agent(peer, message)
        elif peer.kind is PeerKind.OPERATOR:
            self.server.send(peer, self._operators.answer(message))
        elif peer.kind is PeerKind.LEAD:
            self._from_lead(peer, message)
        elif peer.kind is PeerKind.STANDBY:
            if self.mirror is not None:
                self.mirror.on_message(peer, message)
        else:
            self._from_rank(peer, message)

    def _from_agent(self, peer: PeerId, message: AgentToHead) -> None:
        match message:
            case Register():
                if message.node_id == peer.name:
                    skew_s = message.unix_s - time.time() if message.unix_s else 0.0
                    self.feed(NodeRegistered(peer.generation, message, skew_s))
                    self._warn_of(message.node_id)
                else:
                    self._drop(DropReason.UNKNOWN_PEER)
            case Heartbeat(running=running):
                self.feed(AgentSpoke(peer.name, peer.generation, tuple(running)))
            case WorkerStarted() | StartFailed() | WorkerExited():
                self.feed(AgentReported(peer.name, peer.generation, message))
            case PeersProbed(number=number, seconds=seconds):
                self.feed(PeersReached(peer.name, peer.generation, number, seconds))
            case WantsToLeave():
                self.feed(NodeLeaving(peer.name, peer.generation))
            case Leaving(reason=reason):
                self.feed(NodeGone(peer.name, peer.generation, f"its agent left: {reason}"))
            case _:
                assert_never(message)

    def _warn_of(self, node_id: str) -> None:
        """What is odd about a host is said when it joins, before weights load."""
        node = self.state.nodes.get(node_id)
        if node is not None:
            for finding in joining_findings(node_status(node, self._clock()), self._versions):
                logger.warning("preflight: %s", finding)

    def _from_lead(self, peer: PeerId, message: LeadToHead) -> None:
        """Only the connection's own, present incarnation is listened to."""
        if message.incarnation != peer.generation or not self.state.is_current(peer.name, peer.generation):
            self._drop(DropReason.STALE)
            return
        match message:
            case Tokens() | KVEvents():
                if not self.table.on_message(peer.name, message):
                    self._drop(DropReason.REPEATED)
            case Pong():
                pass
            case ToPeer():
                self.peers.carry(peer.name, message)
            case Roll():
                # One that opens a route is handed over with it.
                if not self.table.on_message(peer.name, message):
                    self.feed(LeadSpoke(peer.name, peer.generation, message))
            case LeadStats():
                self.table.on_message(peer.name, message)
                self.feed(LeadSpoke(peer.name, peer.generation, message))
            case _:
                self.feed(LeadSpoke(peer.name, peer.generation, message))

    def _from_rank(self, peer: PeerId, message: RankToHead) -> None:
        """A rank's own word: a request to its incarnation's store, or its end."""
        replica_id, _, rank = peer.name.rpartition("/")
        is_current = message.incarnation == peer.generation and self.state.is_current(replica_id, peer.generation)
        if not is_current or not rank.isdecimal():
            self._drop(DropReason.STALE)
        elif isinstance(message, Fault):
            self.feed(LeadSpoke(replica_id, peer.generation, message))
        else:
            now = self._clock()
            for reply in self.rendezvous.handle(replica_id, peer.generation, int(rank), message, now):
                self.server.send(peer._replace(name=f"{replica_id}/{reply.rank}"), reply.message)

    def _execute(self, command: Command) -> list[Event]:
        match command:
            case SendToAgent(node_id=node_id, agent_id=agent_id, message=message):
                self.server.send(PeerId(PeerKind.AGENT, node_id, agent_id), message)
            case RecordIncarnation(replica_id=replica_id, incarnation=incarnation):
                self.rendezvous.forget(replica_id)
                self.incarnations.saw(incarnation)
            case OpenRoute(replica_id=replica_id, incarnation=incarnation, deployment=deployment, ready=ready):
                self.table.open_route(replica_id, incarnation, deployment, ready, command.roll)
            case AskRoll(replica_id=replica_id, incarnation=incarnation):
                self.send_to_lead(replica_id, incarnation, TakeRoll(incarnation=incarnation))
            case DrainRoute(replica_id=replica_id, incarnation=incarnation, ask_lead=ask_lead):
                self.table.drain_route(replica_id, incarnation)
                if ask_lead:
                    self.send_to_lead(replica_id, incarnation, Drain(incarnation=incarnation))
            case CloseRoute(replica_id=replica_id, incarnation=incarnation, blames_requests=blames_requests):
                self.peers.closed(replica_id, incarnation)
                if self.table.close_route(replica_id, incarnation, blames_requests=blames_requests):
                    return [FailureExplained(replica_id)]
            case ResyncRoute(replica_id=replica_id, incarnation=incarnation):
                self.table.resync_route(replica_id, incarnation)
            case Announce(text=text, is_failure=is_failure):
                logger.log(logging.WARNING if is_failure else logging.INFO, "%s", text)
            case _:
                assert_never(command)
        return []

    def _fail_hopeless(self) -> None:
        """Requests whose replicas will not come (back) are told so."""
        for config in self.state.deployments.values():
            replicas = [r for r in self.state.replicas.values() if r.deployment == config.name]
            if self.state.is_stopping:
                self.table.fail_waiting(config.name, "the server is stopping")
            elif replicas and all(replica.state is ReplicaState.FAILED for replica in replicas):
                reason = replicas[0].failure.reason
                self.table.fail_waiting(config.name, f"no replica of {config.model} can be started: {reason}")

    def _drop(self, reason: DropReason) -> None:
        self.server.counters.dropped[reason] += 1
