"""The head process: start-up, main loop, shutdown. Everything it does is done by its parts; this is their life.

Order matters: sockets are bound before anything heavy starts, so that a port in use is said at once; on the way out new
requests are refused first, open ones finish, then workers, agent, HTTP and sockets end. Imports no torch. Called by the
launcher, which hands in what this package may not know: the application's tokenizer and how an agent is started.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TextIO

import uvloop
from prometheus_client import CollectorRegistry

from cluster.answer_journal import AnswerJournal
from cluster.config import ClusterConfig
from cluster.control import ControlPlane
from cluster.control_port import bind_control
from cluster.epoch import next_epoch
from cluster.events import DeploymentApplied, NodeGone
from cluster.garbage import avoid_collection_pauses
from cluster.gateway import Gateway
from cluster.head_gateway import HeadGateway, served_models
from cluster.http_server import HttpServer, bind_http
from cluster.journal_mirror import JournalMirror
from cluster.leadership import Candidate, announced_address, check_same_token, open_lead_store
from cluster.local_agent import AgentCommand, AgentTicket, LocalAgent
from cluster.messages import AgentToHead
from cluster.metrics import HeadMetrics
from cluster.operator_messages import OperatorToHead
from cluster.placement import shortfall
from cluster.records import ReplicaRecord, ReplicaState
from cluster.security import load_or_create_token
from cluster.standby import stand_by
from cluster.standby_messages import StandbyToHead
from cluster.status import ClusterStatus
from cluster.store.contract import StoreUnavailableError
from cluster.store.registry import open_store
from cluster.versions import installed_versions
from sonar.errors import ConfigError
from sonar.messages import LeadToHead, RankToHead
from sonar.transport import Address, PeerKind
from sonar.transport_server import Office, Server

logger = logging.getLogger(__name__)

TICK_S = 0.25
REMEMBER_S = 0.5
LOCAL_NODE = "local"
# A head that serves one deployment from its own host ends when the first start fails twice.
START_ATTEMPTS = 2
# As the command line's: the caller's fault.
EXIT_MISTAKE = 2


@dataclass(frozen=True)
class HeadServices:
    """What the HTTP application is made from.

    Attributes:
        registry: the head's metrics, to be shown with the application's own.
        journal: of answers that outlive their connection and this head; closed by the head.
    """

    gateway: Gateway
    registry: CollectorRegistry
    status: Callable[[], ClusterStatus]
    journal: AnswerJournal


AppFactory = Callable[[HeadServices], Any]


class HeadObserver(Protocol):
    """Whoever wants to see the head's progress; called in its loop, so never for long."""

    def on_listening(self, http: Address, control: Address) -> None:
        """Both ports are open; nothing is served yet."""
        ...

    def on_status(self, status: ClusterStatus) -> None:
        """A node or replica has changed."""
        ...


@dataclass(frozen=True)
class HeadResult:
    """How a head ended. error: for people, when it was not asked to. is_deposed: another head leads."""

    exit_code: int
    error: str = ""
    is_deposed: bool = False


@dataclass
class _Stop:
    """That, and how often, the head was asked to end. event: also when it has to for another reason."""

    num_requests: int = 0
    event: asyncio.Event = field(default_factory=asyncio.Event)


class Seat(NamedTuple):
    """What a head that was elected takes over from its time of standing by. listener: of HTTP; stays open after it."""

    listener: socket.socket
    candidate: Candidate

    @property
    def office(self) -> Office:
        """By which it speaks."""
        return Office(self.candidate.epoch, self.candidate.is_held)


class Head:
    """Owns the parts of one head process.

    Args:
        seat: of a head that was elected; without one this head is the only one of its store.
        app_factory: makes the ASGI application.
        agent_command: starts an agent for this host; None leaves this host out of the cluster.
        exit_when_failed: end when a replica cannot be started at all, instead of waiting for better hosts.

    Raises:
        ConfigError: a port is in use, another head uses the state directory, or the token cannot be read.
    """

    def __init__(
        self,
        config: ClusterConfig,
        app_factory: AppFactory,
        *,
        agent_command: AgentCommand | None = None,
        observer: HeadObserver | None = None,
        exit_when_failed: bool = False,
        seat: Seat | None = None,
    ) -> None:
        self.config = config
        self._seat = seat
        self._observer = observer
        self._exit_when_failed = exit_when_failed
        self._result = HeadResult(0)
        self._stop = _Stop()
        with ExitStack() as opened:
            self._open_parts(opened, app_factory, agent_command)
            self._opened = opened.pop_all()

    def _open_parts(self, opened: ExitStack, app_factory: AppFactory, agent_command: AgentCommand | None) -> None:
        config = self.config
        if self._seat is None:
            opened.enter_context(lock_state_dir(config))
            listener = bind_http(config.network.http_host, config.network.http_port)
        else:
            listener = self._seat.listener.dup()  # an HTTP server closes its own
        opened.callback(listener.close)
        server = Server(
            load_or_create_token(config.token_path),
            {
                PeerKind.AGENT: AgentToHead,
                PeerKind.LEAD: LeadToHead,
                PeerKind.RANK: RankToHead,
                PeerKind.OPERATOR: OperatorToHead,
                PeerKind.STANDBY: StandbyToHead,
            },
        )
        opened.callback(server.close)
        control_address = bind_control(server, config)
        store = open_store(config.store, config.state_dir)
        opened.callback(store.close)
        server.office = self._seat.office if self._seat is not None else Office(next_epoch(store))
        journal = AnswerJournal(config.state_dir / "answers.db")
        opened.callback(journal.close)
        self.control_address = control_address
        self.control = ControlPlane(config, server, store, installed_versions(), time.monotonic, server.office.epoch)
        if self._seat is not None:
            self.control.mirror = journal.mirror = JournalMirror(server.send, journal.rows)
            opened.callback(self.control.mirror.close)
        state, table = self.control.state, self.control.table
        gateway = HeadGateway(table, partial(served_models, state, table, int(time.time())))
        self.services = HeadServices(gateway, HeadMetrics(self.control).registry, self.control.status, journal)
        self.http = HttpServer(app_factory(self.services), listener, config.network.tls)
        self.agent = self._make_agent(agent_command) if agent_command else None

    def _make_agent(self, command: AgentCommand) -> LocalAgent:
        ticket = AgentTicket(
            head=_reachable(self.control_address),
            token_path=self.config.token_path,
            node_id=LOCAL_NODE,
            state_dir=self.config.state_dir / "agent",
            outlive_s=self.config.keep_workers_s,
        )
        return LocalAgent(ticket, command, lambda reason: self.control.feed(NodeGone(LOCAL_NODE, None, reason)))

    def request_stop(self) -> None:
        """Begins to end the head; asked a second time, it ends without draining."""
        self._stop.num_requests += 1
        self._stop.event.set()

    async def run(self) -> HeadResult:
        """The head's life, in the running loop; when it returns, no child process and no socket is left.

        Raises:
            SonarError: the HTTP application did not start.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._startup()
                routines = [group.create_task(self._tick_forever()), group.create_task(self._remember_in_time())]
                if self._seat is not None:
                    routines.append(group.create_task(self._learn_of_successor(self._seat.candidate)))
                group.create_task(self.http.run())
                if self.agent is not None:
                    group.create_task(self.agent.run())
                await self._stop.event.wait()
                if self._result.is_deposed:
                    logger.warning("another head leads: this one stands by from here on")
                elif self.control.mirror is not None and self.control.mirror.num_followers:
                    await self._hand_over()
                else:
                    await self._stop_cluster()
                await self._close_up()
                for routine in routines:
                    routine.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if self.agent is not None:
                await self.agent.stop(0.0)
            self._opened.close()
        return self._result

    def _startup(self) -> None:
        self.control.open()
        if self._observer is not None:
            self._observer.on_listening(self.http.address, self.control_address)
        for deployment in self.config.deployments:
            self.control.feed(DeploymentApplied(deployment))

    async def _remember_in_time(self) -> None:
        """In a thread: a store that is slow or away holds nothing up here."""
        control = self.control
        while True:
            await asyncio.sleep(REMEMBER_S)
            try:
                if control.incarnations.is_near:
                    await asyncio.to_thread(control.incarnations.raise_ceiling)
                nodes = control.state.nodes_with_workers
                if control.state.adoption.is_over and control.roster.is_stale(nodes):
                    await asyncio.to_thread(control.roster.save, nodes)
            except StoreUnavailableError as error:
                logger.warning("%s; serving goes on, and it is asked again", error)

    async def _tick_forever(self) -> None:
        shown: object = None
        while True:
            self.control.guarded_tick()
            if self._observer is not None and (news := _news(self.control)) != shown:
                shown = news
                self._observer.on_status(self.control.status())
            if self._exit_when_failed and not self._stop.event.is_set():
                self._check_start()
            if self.config.nodes.exit_when_missing and self.control.state.roll_call.failure and not self._result.error:
                self._result = HeadResult(1, self.control.state.roll_call.failure)
                self.request_stop()
            await asyncio.sleep(TICK_S)

    def _check_start(self) -> None:
        """Ends a head whose only purpose cannot be met."""
        for replica in self.control.state.replicas.values():
            failure = replica.failure
            if replica.was_ready:
                continue
            if reason := self._placing_problem(replica):
                self._result = HeadResult(EXIT_MISTAKE, reason)
            elif failure.is_permanent and failure.reason in failure.log_tail:  # nothing that the log could add
                self._result = HeadResult(EXIT_MISTAKE, failure.reason)
            elif failure.is_permanent or failure.count >= START_ATTEMPTS:
                text = _failure_text(replica.replica_id, failure.reason, failure.log_tail)
                self._result = HeadResult(EXIT_MISTAKE if failure.is_permanent else 1, text)
            else:
                continue
            self.request_stop()
            return

    def _placing_problem(self, replica: ReplicaRecord) -> str:
        """Why the nodes there are can never hold it; empty when they can, or none has joined."""
        state = self.control.state
        views = [node.view for node in state.nodes.values() if node.takes_work]
        if not views or replica.state is not ReplicaState.PLACING or not state.roll_call.is_over:
            return ""
        engine = state.deployments[replica.deployment].engine_config
        return shortfall(engine.parallel.world_size, engine.device, views)

    async def _learn_of_successor(self, candidate: Candidate) -> None:
        await candidate.hold()
        self._result = HeadResult(0, is_deposed=True)
        self._stop.event.set()

    async def _hand_over(self) -> None:
        """Another head stands by: workers go on, for it; what clients of this one have open is finished first."""
        logger.info("handing over: %d open requests", self.control.table.num_open)
        self.control.table.close_to_new()
        await self._wait_until(lambda: not self.control.table.num_open, self.config.timeouts.drain_s)

    async def _stop_cluster(self) -> None:
        """Open requests first, then replicas. Each wait has a deadline; a second request ends it."""
        times = self.config.timeouts
        logger.info("stopping: %d open requests", self.control.table.num_open)
        self.control.begin_stop()
        await self._wait_until(
            lambda: self.control.state.is_stopped and not self.control.table.num_open,
            times.drain_s + times.kill_grace_s,
        )

    async def _close_up(self) -> None:
        """HTTP, then this host's own agent."""
        is_hasty = self._stop.num_requests > 1
        grace_s = self.config.timeouts.kill_grace_s
        self.http.stop(now=is_hasty or self._result.is_deposed)
        if self.agent is not None:
            self.agent.expect_end()
            if is_hasty or not self.control.shut_down_node(LOCAL_NODE, grace_s):
                self.agent.terminate()
            await self.agent.stop(0.0 if is_hasty else grace_s + 2.0)

    async def _wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_done() and self._stop.num_requests < 2:
            if time.monotonic() > deadline_s:
                logger.warning("gave up waiting for %d open requests", self.control.table.num_open)
                return
            await asyncio.sleep(0.02)


def run_head(
    config: ClusterConfig,
    app_factory: AppFactory,
    *,
    agent_command: AgentCommand | None = None,
    observer: HeadObserver | None = None,
    exit_when_failed: bool = False,
) -> HeadResult:
    """Runs a head in this process until SIGTERM, SIGINT or a failure; see `Head`. Call it from the main thread."""

    avoid_collection_pauses()
    life = _Life()

    def make_head(seat: Seat | None) -> Head:
        return Head(
            config,
            app_factory,
            agent_command=agent_command,
            observer=observer,
            exit_when_failed=exit_when_failed,
            seat=seat,
        )

    async def serve() -> HeadResult:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, life.request_stop)
        if config.store.kind == "etcd":
            return await _serve_in_turn(config, make_head, life)
        return await life.lead(make_head(None))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


class _Life:
    """Whom a signal is for: the head that leads in this process, or the wait for the lead."""

    def __init__(self) -> None:
        self._head: Head | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._is_over = False

    def is_over(self) -> bool:
        """Whether a stop was asked for."""
        return self._is_over

    def request_stop(self) -> None:
        """As `Head.request_stop`."""
        self._is_over = True
        if self._head is not None:
            self._head.request_stop()
        elif self._waiting is not None:
            self._waiting.cancel()

    async def lead(self, head: Head) -> HeadResult:
        """The head's life."""
        self._head = head
        try:
            return await head.run()
        finally:
            self._head = None

    async def wait(self, work: Coroutine[None, None, None]) -> None:
        """Until it is done, or a stop is asked for."""
        self._waiting = asyncio.create_task(work)
        if self._is_over:
            self._waiting.cancel()
        await asyncio.wait([self._waiting])
        if not self._waiting.cancelled():
            self._waiting.result()


async def _serve_in_turn(config: ClusterConfig, make_head: Callable[[Seat], Head], life: _Life) -> HeadResult:
    """One of several heads: stands by, leads, and stands by again when it was deposed."""
    with ExitStack() as opened:
        opened.enter_context(lock_state_dir(config))
        listener = opened.enter_context(bind_http(config.network.http_host, config.network.http_port))
        me = announced_address(config, listener)
        with closing(open_store(config.store, config.state_dir)) as store:
            check_same_token(store, load_or_create_token(config.token_path))
        while True:
            with closing(open_lead_store(config)) as store:
                candidate = Candidate(store, me)
                await life.wait(stand_by(config, listener, candidate, me))
                result = HeadResult(0) if life.is_over() else await life.lead(make_head(Seat(listener, candidate)))
                if not result.is_deposed:
                    candidate.resign()
                    return result


def lock_state_dir(config: ClusterConfig) -> TextIO:
    """One head a folder, for as long as the file is open.

    Raises:
        ConfigError: another head has it.
    """
    config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = (config.state_dir / "head.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(
            f"another head uses {config.state_dir}; stop it, or choose another directory", param="state_dir"
        ) from error
    return lock


def _news(control: ControlPlane) -> object:
    """What of a status is worth showing when it changes. Not from a status: one of 1,000 hosts takes 20 ms."""
    nodes = [(node.node_id, node.state) for node in control.state.nodes.values()]
    stopping = control.table.num_open if control.state.is_stopping else None
    replicas = [
        (r.replica_id, r.state, r.incarnation, r.progress.phase, r.progress.done, r.note)
        for r in control.state.replicas.values()
    ]
    return stopping, nodes, replicas


def _reachable(address: Address) -> Address:
    """How this host's own processes reach a socket that may listen on all addresses."""
    return address._replace(host={"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host))


def _failure_text(replica_id: str, reason: str, log_tail: str) -> str:
    lines = "\n".join(f"  | {line}" for line in log_tail.splitlines()[-20:])
    return f"{replica_id} cannot be started: {reason}" + (f"\n{lines}" if lines else "")
