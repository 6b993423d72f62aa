"""A process's connection to its head: a ZMQ DEALER used by one thread, without asyncio.

libzmq's own I/O thread does sockets and encryption outside the interpreter's lock, so a second Python thread and queue
would only add hand-overs; and `zmq.asyncio` costs five times the CPU a round trip. Called by the agent's loop and the
lead's engine loop. Does not know what messages mean; of the connection it tells only that it was made again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from sonar.transport import (
    EPOCH_BYTES,
    Address,
    Codec,
    DropReason,
    HandshakeRefusedError,
    PeerId,
    TransportCounters,
    TransportSettings,
    UnreachableError,
)
from sonar.transport_keys import derive_keys
from sonar.transport_options import FAILED_EVENTS, WATCHED_EVENTS, set_common_options

# One failure can be a head that was just restarting; a second in a row is an answer.
_REFUSED_AFTER = 2
_ON_WAIT_S = 0.25
# Without a connection for so long, another of the heads is tried; one that has answered gets time for the handshake.
# After a break the others come first: the head they were is likely to be where the lead has gone.
_MOVE_ON_S = 1.0
_SHAKE_HANDS_S = 2.5


@dataclass
class _News:
    """What the monitor has told. failures: refused handshakes in a row. is_reconnected: nobody has taken it in yet.
    move_on_s: when another head is tried, unless there is a connection by then."""

    is_connected: bool = False
    move_on_s: float = 0.0
    is_reconnected: bool = False
    failures: int = 0


class Client:
    """Owns the DEALER socket of one process and its monitor.

    All methods belong to one thread, except `send`, which any thread may call while no other method runs (a loader
    reporting progress). Unsent messages survive a reconnect and arrive in order; a message in flight while the
    connection broke may be lost, which receivers see by sequence numbers.

    Args:
        incoming: union of the messages that may arrive.
        others: addresses of further heads; one that does not answer for a second is left for the next.

    Attributes:
        address: of the present head. epoch: of the latest head that was heard; messages of an earlier one are dropped.
    """

    def __init__(
        self,
        address: Address,
        token: str,
        peer: PeerId,
        incoming: Any,
        settings: TransportSettings | None = None,
        *,
        others: Sequence[Address] = (),
    ) -> None:
        self.address = address
        self._others = deque(others)
        self.counters = TransportCounters()
        self.epoch = 0
        self._settings = settings or TransportSettings()
        self._codec = Codec(incoming, self._settings.max_frame_bytes)
        self._send_lock = threading.Lock()
        self._news = _News()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        _set_options(self._socket, token, peer, (address, *others), self._settings)
        self._monitor = self._socket.get_monitor_socket(WATCHED_EVENTS | zmq.EVENT_CONNECTED)
        self._poller = zmq.Poller()
        for watched in (self._socket, self._monitor):
            self._poller.register(watched, zmq.POLLIN)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """To register in a poller of the caller's: when one is readable, call `receive(0)`."""
        return self._socket, self._monitor

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Of all heads, the present one first."""
        return self.address, *self._others

    @property
    def is_connected(self) -> bool:
        """Whether the last news of the connection was good."""
        return self._news.is_connected

    def connect(self, timeout_s: float, on_wait: Callable[[float], None] | None = None) -> None:
        """Connects and waits until both sides have proved their keys; later breaks are mended by libzmq.

        Args:
            on_wait: told some four times a second how long it has waited; what it raises ends the wait.

        Raises:
            HandshakeRefusedError: the join token is not that head's.
            UnreachableError: no head there within the time.
        """
        self._socket.connect(self.address.endpoint)
        began_s = time.monotonic()
        self._news.move_on_s = began_s + _MOVE_ON_S
        while not self._news.is_connected and self._news.failures < _REFUSED_AFTER:
            waited_s = time.monotonic() - began_s
            if waited_s >= timeout_s:
                break
            if on_wait is not None:
                on_wait(waited_s)
            if self._monitor.poll(max(1, int(min(timeout_s - waited_s, _ON_WAIT_S) * 1000))):
                self._read_monitor()
            self._move_on_if_lost()
        if self._news.is_connected:
            self._news.is_reconnected = False
        elif self._news.failures:
            raise HandshakeRefusedError(
                f"{self.address} refused the handshake: the join token is not the one of that head, or something else "
                "listens there; copy the head's token file to this host"
            )
        else:
            names = ", ".join(map(str, sorted(self.addresses)))
            raise UnreachableError(
                f"no head answered at {names} within {timeout_s:g} s; check the address, that the head runs, "
                "and that this port is open between the hosts"
            )

    def send(self, message: msgspec.Struct) -> bool:
        """Queues a message. False when the queue is full: the head has not read for long; keep it and try again."""
        frame = self._codec.encode(message)
        with self._send_lock:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self.counters.unsent += 1
                return False
            self.counters.sent += 1
        return True

    def wait_writable(self, timeout_s: float) -> bool:
        """Waits until `send` would take a message, or the link has changed."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLOUT)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(int(timeout_s * 1000)))
        if self._monitor in ready:
            self._read_monitor()
        self._move_on_if_lost()
        return self._socket in ready

    def receive(self, timeout_s: float, limit: int = 256) -> list[Any]:
        """Messages that have arrived, at most `limit`; waits up to the time for a first one (or news of the link)."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._monitor in ready:
            self._read_monitor()
        self._move_on_if_lost()
        messages: list[msgspec.Struct] = []
        while self._socket in ready and len(messages) < limit:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.counters.received += 1
            message = self._decode(frames)
            if isinstance(message, DropReason):
                self.counters.dropped[message] += 1
            else:
                messages.append(message)
        return messages

    def _decode(self, frames: list[bytes]) -> msgspec.Struct | DropReason:
        """The message, if it is of the latest head that this process has heard of."""
        if len(frames) != 2 or len(frames[0]) != EPOCH_BYTES:
            return DropReason.JUNK
        message = self._codec.decode(frames[1:])
        if not isinstance(message, DropReason):
            epoch = int.from_bytes(frames[0], "big")
            if epoch < self.epoch:
                return DropReason.DEPOSED
            self.epoch = epoch
        return message

    def take_reconnected(self) -> bool:
        """Whether the connection was made anew since the last call: say hello again."""
        is_reconnected, self._news.is_reconnected = self._news.is_reconnected, False
        return is_reconnected

    def close(self, linger_ms: int | None = None) -> None:
        """Closes, waiting for unsent messages at most the given time (default: the settings')."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(self._settings.linger_ms if linger_ms is None else linger_ms)
        self._context.term()

    def _move_on_if_lost(self) -> None:
        """Tries the next head when this one is away. What waits to be sent is lost with it: who leads asks anew."""
        news, now = self._news, time.monotonic()
        if news.is_connected or not self._others or now < news.move_on_s:
            return
        self._socket.disconnect(self.address.endpoint)
        self._others.append(self.address)
        self.address = self._others.popleft()
        self._socket.connect(self.address.endpoint)
        news.move_on_s, news.failures = now + _MOVE_ON_S, 0

    def _read_monitor(self) -> None:
        news = self._news
        while self._monitor.poll(0):
            told = recv_monitor_message(self._monitor)
            event = told["event"]
            # libzmq may still connect to the head that was left, and tells of it.
            if self._others and not self.address.is_at(told["endpoint"].decode()):
                continue
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.counters.handshakes += 1
                news.is_connected, news.is_reconnected, news.failures = True, True, 0
            elif event & FAILED_EVENTS:
                self.counters.refused += 1
                news.failures += 1
            elif event == zmq.EVENT_CONNECTED:
                news.move_on_s = time.monotonic() + _SHAKE_HANDS_S
            elif event == zmq.EVENT_DISCONNECTED:
                self.counters.disconnects += news.is_connected
                if news.is_connected:
                    news.is_connected, news.move_on_s = False, 0.0


def _set_options(
    dealer: zmq.Socket[bytes], token: str, peer: PeerId, addresses: Sequence[Address], settings: TransportSettings
) -> None:
    server, client = derive_keys(token, "server"), derive_keys(token, "client")
    dealer.curve_serverkey = server.public
    dealer.curve_publickey, dealer.curve_secretkey = client
    dealer.setsockopt(zmq.IDENTITY, peer.encode())
    dealer.setsockopt(zmq.RECONNECT_IVL, settings.reconnect_ms)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, settings.reconnect_max_ms)
    # Where one of them needs IPv6 the socket speaks both.
    set_common_options(dealer, max(addresses, key=lambda address: address.needs_ipv6), settings)
