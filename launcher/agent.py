"""The node agent: joins a head, tells of this host, starts and ends workers as told, reports every exit.

One synchronous loop that sleeps until something happens: a message, a worker's end, a signal, a deadline. It decides
nothing; what it is told for a worker that is gone it ignores. Started by `sonar join` or, for a head's own host, by the
head (`python -m launcher.agent`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import queue
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import msgspec
import zmq

from cluster.agent_lock import lock_agent
from cluster.config import DEFAULT_CONTROL_PORT, check_name
from cluster.local_agent import AgentCommand, AgentProcess, AgentTicket
from cluster.messages import (
    HeadToAgent,
    Heartbeat,
    KillReplica,
    Leaving,
    PeersProbed,
    ProbePeers,
    Refused,
    Register,
    RegisterAgain,
    Registered,
    Shutdown,
    StartFailed,
    StartWorker,
    StopWorker,
    WantsToLeave,
)
from cluster.security import read_token
from cluster.versions import installed_versions
from launcher.engines import engine_table
from launcher.hardware import default_node_id, inspect_hardware
from launcher.network import LocalRoute, interface_of, mtu_of, probe_peers, route_to
from launcher.supervisor import Supervisor
from sonar.errors import ConfigError, SonarError, UserError
from sonar.process import die_with_parent
from sonar.transport import PROTOCOL_VERSION, Address, PeerId, PeerKind, parse_addresses
from sonar.transport_client import Client
from sonar.worker.host import available_memory

logger = logging.getLogger(__name__)

# Marks every process that descends from an agent; see `launcher.leftovers`.
MARK_VARIABLE = "SONAR_AGENT_STATE"
EXIT_REFUSED = 3
TERM_GRACE_S = 5.0
REMIND_S = 10.0


@dataclass(frozen=True)
class AgentSettings:
    """What an agent is started with.

    Attributes:
        heads: one of them leads.
        route: this host's address and interface towards the head, for all traffic between hosts.
        engines: see `launcher.engines`.
        drain_s: how long it waits for the head to move its work away when it is told to end.
        outlive_s: of a head's own agent: it ends without its head after so long; None for one that waits for a head.
    """

    heads: tuple[Address, ...]
    route: LocalRoute
    token: str
    node_id: str
    state_dir: Path
    engines: dict[str, str]
    connect_timeout_s: float
    drain_s: float
    outlive_s: float | None = None


@dataclass
class _Departure:
    """How far this agent's end is. signals: how many asked for it. leave_by_s: set while the head moves its work away.
    exit_code: set once workers are being ended."""

    signals: int = 0
    leave_by_s: float | None = None
    exit_code: int | None = None
    reason: str = ""

    @property
    def has_begun(self) -> bool:
        """Whether no more work is taken."""
        return self.leave_by_s is not None or self.exit_code is not None


class _InterruptedWaitError(Exception):
    """A signal came while there was no head yet."""


class Agent:
    """Owns the link to the head and the supervisor of this host's workers."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        peer = PeerId(PeerKind.AGENT, settings.node_id, secrets.randbits(62))
        head, *others = settings.heads
        self._link = Client(head, settings.token, peer, HeadToAgent, others=others)
        mark = f"{MARK_VARIABLE}={settings.state_dir}"
        self._supervisor = Supervisor(
            settings.state_dir, mark, lambda: self._link.addresses, settings.token, settings.engines, time.monotonic
        )
        route = settings.route
        self._hardware = msgspec.structs.replace(
            inspect_hardware(),
            interface=route.interface,
            address=route.address,
            mtu=mtu_of(route.interface),
            disk_free_bytes=shutil.disk_usage(settings.state_dir).free,
        )
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._heartbeat_interval_s = math.inf
        self._next_heartbeat_s = math.inf
        self._connected_s = time.monotonic()
        self._head_loss_s = math.inf
        self._departure = _Departure()
        self._probed: queue.SimpleQueue[PeersProbed] = queue.SimpleQueue()

    def run(self) -> int:
        """Serves until told to end; returns the exit code.

        Raises:
            HandshakeRefusedError, UnreachableError: there is no head that takes this token.
        """
        swept = self._supervisor.sweep()
        self._catch_signals()
        try:
            self._connect()
            logger.info(
                "node %s joins %s by %s; swept %s",
                self._settings.node_id,
                self._link.address,
                self._settings.route,
                swept or "nothing",
            )
            self._register()
            departure = self._departure
            while departure.exit_code is None or self._supervisor.running():
                self._turn()
            self._link.send(Leaving(reason=departure.reason))
            self._link.close()
            return departure.exit_code
        except _InterruptedWaitError:
            self._link.close(0)
            return 0
        except SonarError:
            self._link.close(0)
            raise
        finally:
            self._supervisor.kill_all()

    def _connect(self) -> None:
        """Waits for the head, which may come later than this host."""
        next_word_s = REMIND_S

        def on_wait(waited_s: float) -> None:
            nonlocal next_word_s
            if self._departure.signals:
                raise _InterruptedWaitError
            if waited_s >= next_word_s:
                next_word_s += REMIND_S
                logger.warning("no head answers at %s yet; tried for %.0f s", self._link.address, waited_s)

        self._link.connect(self._settings.connect_timeout_s, on_wait)

    def _turn(self) -> None:
        """Waits for whatever comes first, and deals with all that has come."""
        self._wait()
        for message in self._link.receive(0.0):
            self._obey(message)
        if self._link.take_reconnected():
            self._register()
        for report in self._supervisor.reap():
            logger.info("%s ended: exit code %d, signal %d", report.worker, report.exit_code, report.signal)
            self._link.send(report)
        while not self._probed.empty():
            self._link.send(self._probed.get())
        self._supervisor.tick()
        self._advance_departure()
        now = time.monotonic()
        if self._link.is_connected:
            self._connected_s = now
            if now >= self._next_heartbeat_s:
                self._next_heartbeat_s = now + self._heartbeat_interval_s
                running = [worker.worker for worker in self._supervisor.running()]
                self._link.send(Heartbeat(memory_available_bytes=available_memory(), running=running))
        else:
            self._go_on_alone(now - self._connected_s)

    def _go_on_alone(self, alone_s: float) -> None:
        """Workers compute on without a head, until it is not to be expected that anybody comes for what they have."""
        outlive_s = self._settings.outlive_s
        if outlive_s is not None and alone_s > outlive_s and self._departure.exit_code is None:
            self._end(0, f"its head was gone for {alone_s:.0f} s", TERM_GRACE_S)
        elif alone_s > self._head_loss_s and self._supervisor.running():
            logger.warning("no head for %.0f s: ending the workers", alone_s)
            self._supervisor.stop_all(TERM_GRACE_S)

    def _wait(self) -> None:
        poller = zmq.Poller()
        for descriptor in (*self._link.sockets, self._wake_receiver, *self._supervisor.pidfds()):
            poller.register(descriptor, zmq.POLLIN)
        now = time.monotonic()
        due_s = min(self._next_heartbeat_s, self._supervisor.next_deadline_s(), now + 1.0)
        ready = dict(poller.poll(max(0, math.ceil((due_s - now) * 1000))))
        if self._wake_receiver.fileno() in ready:
            self._wake_receiver.recv(64)

    def _obey(self, message: HeadToAgent) -> None:
        match message:
            case Registered(heartbeat_interval_s=interval_s, head_loss_s=loss_s):
                self._heartbeat_interval_s, self._next_heartbeat_s = interval_s, time.monotonic()
                self._head_loss_s = loss_s
            case Refused(reason=reason):
                logger.error("the head refused this node: %s", reason)
                self._end(EXIT_REFUSED, reason, 0.0)
            case RegisterAgain():
                self._register()
            case StartWorker():
                if self._departure.has_begun:
                    self._link.send(StartFailed(worker=message.worker, error="the node is leaving", permanent=False))
                else:
                    self._link.send(self._supervisor.start(message))
            case StopWorker(worker=worker, grace_s=grace_s):
                self._supervisor.stop(worker, grace_s)
            case KillReplica(replica_id=replica_id, incarnation=incarnation, dump_stacks=dump_stacks):
                self._supervisor.kill(replica_id, incarnation, dump_stacks=dump_stacks)
            case ProbePeers():
                self._probe(message)
            case Shutdown(grace_s=grace_s):
                self._end(0, "the head asked for it", grace_s)
            case _:
                assert_never(message)

    def _probe(self, asked: ProbePeers) -> None:
        """In a thread, because a host that does not answer takes its time; the loop sends what it found."""

        def work() -> None:
            self._probed.put(PeersProbed(number=asked.number, seconds=probe_peers(asked.peers)))
            with contextlib.suppress(OSError):
                self._wake_sender.send(b"p")

        threading.Thread(target=work, name="probe", daemon=True).start()

    def _register(self) -> None:
        register = Register(
            protocol=PROTOCOL_VERSION,
            node_id=self._settings.node_id,
            pid=os.getpid(),
            versions=installed_versions(),
            hardware=self._hardware,
            running=self._supervisor.running(),
            unix_s=time.time(),
        )
        self._link.send(register)
        if self._departure.leave_by_s is not None:
            self._link.send(WantsToLeave())

    def _end(self, exit_code: int, reason: str, grace_s: float) -> None:
        self._departure.exit_code, self._departure.reason = exit_code, reason
        self._supervisor.stop_all(grace_s)

    def _advance_departure(self) -> None:
        """After a first signal the head moves the work away; a second one, or the deadline, ends what is left."""
        departure, now = self._departure, time.monotonic()
        if not departure.signals or departure.exit_code is not None:
            return
        if departure.leave_by_s is None:
            departure.leave_by_s = now + (self._settings.drain_s if self._link.is_connected else 0.0)
            logger.info("leaving: at most %.0f s for open requests", departure.leave_by_s - now)
            self._link.send(WantsToLeave())
        if not self._supervisor.running() or now >= departure.leave_by_s or departure.signals > 1:
            self._end(0, departure.reason, TERM_GRACE_S)

    def _on_signal(self, number: int, _: object) -> None:
        self._departure.signals += 1
        self._departure.reason = signal.Signals(number).name

    def _catch_signals(self) -> None:
        """SIGTERM and SIGINT make the agent leave; a pipe wakes the loop's wait."""
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        signal.set_wakeup_fd(self._wake_sender.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)


def local_agent_command(engines: Sequence[str] = ()) -> AgentCommand:
    """How a head starts the agent of its own host.

    Args:
        engines: "NAME=MODULE:FUNCTION" items beside the known ones.
    """

    def command(ticket: AgentTicket) -> AgentProcess:
        flags = {
            "--head": str(ticket.head),
            "--token-file": str(ticket.token_path),
            "--node-id": ticket.node_id,
            "--state-dir": str(ticket.state_dir),
            "--parent-pid": str(os.getpid()),
            "--outlive-s": str(ticket.outlive_s),
        }
        words = [word for pair in flags.items() for word in pair]
        words += [word for item in engines for word in ("--engine", item)]
        # The child finds modules where this process does, and not, as "-m" would, in the directory it happens to be in.
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        return AgentProcess([sys.executable, "-m", "launcher.agent", *words], environment)

    return command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of an agent, but the head's address and the state directory."""
    parser.add_argument("--token-file", required=True, type=Path, help="the head's join token, copied to this host")
    parser.add_argument("--node-id", default=default_node_id(), help="name of this host in the cluster")
    parser.add_argument(
        "--address",
        default="",
        help="of this host, for traffic with the others (default: that of the route to the head)",
    )
    parser.add_argument("--connect-timeout-s", type=float, default=600.0, help="s to wait for a head (default: 600)")
    parser.add_argument("--drain-timeout-s", type=float, default=40.0, help="s for open requests when it is ended")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=MODULE:FUNCTION", help="one more engine")
    parser.add_argument("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--outlive-s", type=float, default=0.0, help=argparse.SUPPRESS)


def run_agent(args: argparse.Namespace) -> int:
    """Runs an agent to its end; returns the exit code.

    Raises:
        ConfigError: a flag is wrong, or another agent uses the state directory.
        HandshakeRefusedError, UnreachableError: see `Agent.run`.
    """
    check_name("node_id", args.node_id)
    heads = parse_addresses(args.head, DEFAULT_CONTROL_PORT)
    settings = AgentSettings(
        heads=heads,
        route=LocalRoute(args.address, interface_of(args.address)) if args.address else route_to(heads[0]),
        token=read_token(args.token_file),
        node_id=args.node_id,
        state_dir=args.state_dir.resolve(),
        engines=engine_table(args.engine),
        connect_timeout_s=args.outlive_s or args.connect_timeout_s,
        drain_s=args.drain_timeout_s,
        outlive_s=args.outlive_s or None,
    )
    if args.parent_pid and not args.outlive_s:
        die_with_parent(args.parent_pid)
    os.environ[MARK_VARIABLE] = str(settings.state_dir)
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = lock_agent(settings.state_dir, args.head)
        if lock is None:
            raise ConfigError(f"another agent uses {settings.state_dir}; give this one its own --state-dir")
        stack.enter_context(lock)
        return Agent(settings).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m launcher.agent`."""
    parser = argparse.ArgumentParser(prog="sonar-agent", description="joins this host to a head and runs its workers")
    parser.add_argument("--head", required=True, metavar="HOST[:PORT],...", help="the heads' control ports")
    parser.add_argument("--state-dir", required=True, type=Path, help="for logs and records of this agent alone")
    add_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return run_agent(args)
    except SonarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


if __name__ == "__main__":
    sys.exit(main())
