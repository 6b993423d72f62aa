"""The head's end of all control links: one ZMQ ROUTER in an asyncio loop, without zmq.asyncio's cost.

The loop watches the socket's descriptor and hands every decoded message to one callback, at most a burst at a time, so
that HTTP traffic is not held up. Sending is a plain call. Not thread-safe: it belongs to the loop that opened it. Does
not know what messages mean, nor whether a peer's incarnation is current: that is the callback's to judge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from sonar.errors import ConfigError
from sonar.transport import (
    EPOCH_BYTES,
    Address,
    Codec,
    DropReason,
    PeerId,
    PeerKind,
    TransportCounters,
    TransportSettings,
)
from sonar.transport_keys import ZAP_DOMAIN, KeyGate, derive_keys
from sonar.transport_options import FAILED_EVENTS, WATCHED_EVENTS, set_common_options

logger = logging.getLogger(__name__)

MessageHandler = Callable[[PeerId, Any], None]
_BURST = 128


class Office(NamedTuple):
    """By what right a head speaks. epoch: in front of each of its frames.

    is_held: asked before each message; while it is false nobody is sent anything, as if all were away."""

    epoch: int = 0
    is_held: Callable[[], bool] = lambda: True


class Server:
    """Owns the ROUTER socket, its key gate and its monitor.

    Args:
        incoming: for each kind of peer, the union of messages it may send.

    Attributes:
        office: of this head. Set it before the first message.
    """

    def __init__(self, token: str, incoming: Mapping[PeerKind, Any], settings: TransportSettings | None = None) -> None:
        self.counters = TransportCounters()
        self.office = Office()
        self._settings = settings or TransportSettings()
        self._token = token
        self._codecs = {kind: Codec(union, self._settings.max_frame_bytes) for kind, union in incoming.items()}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._gate = KeyGate(self._context, derive_keys(token, "client").public)
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._socket.get_monitor_socket(WATCHED_EVENTS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: MessageHandler | None = None
        self._is_drain_planned = False

    def bind(self, host: str, port: int) -> Address:
        """Listens on that one address. Port 0 takes a free one. Returns what it listens on.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
        """
        address = Address(host, port)
        server = derive_keys(self._token, "server")
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = server
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer is an error, not a silent loss
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnect replaces its own half-dead connection
        set_common_options(self._socket, address, self._settings)
        self._gate.start()
        try:
            self._socket.bind(address.endpoint if port else address._replace(port=1).endpoint[:-1] + "*")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"control port {port} on {host} cannot be used ({error.strerror}); stop what listens there, or choose "
                "another address or port for the head",
                param="control_port",
            ) from error
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes), bound
        return Address(host, int(bound.rstrip(b"\0").rpartition(b":")[2]))

    def open(self, handler: MessageHandler) -> None:
        """Begins to hand messages to the callback, in the running loop."""
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._plan_drain()
        self._read_monitor()

    def send(self, peer: PeerId, message: msgspec.Struct) -> bool:
        """Queues a message. False when the peer is not connected or does not read; it is then not sent at all."""
        frame = self._codecs[peer.kind].encode(message)
        if not self.office.is_held():
            self.counters.unsent += 1
            return False
        epoch = self.office.epoch.to_bytes(EPOCH_BYTES, "big")
        try:
            self._socket.send_multipart([peer.encode(), epoch, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counters.unsent += 1
            return False
        finally:
            # The descriptor is edge-triggered: a message that arrives during a send raises no further event.
            self._plan_drain()
        self.counters.sent += 1
        return True

    def close(self) -> None:
        """Stops listening; waits for unsent messages at most the settings' linger time. A second call does nothing."""
        if self._socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_reader(self._monitor.fileno())
            self._loop = None
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(self._settings.linger_ms)
        self._gate.close()
        self._context.term()

    def _plan_drain(self) -> None:
        if self._loop is not None and not self._is_drain_planned:
            self._is_drain_planned = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_planned = False
        if self._loop is None:
            return
        for _ in range(_BURST):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(identity, frames)
        self._plan_drain()

    def _handle(self, identity: bytes, frames: list[bytes]) -> None:
        self.counters.received += 1
        peer = PeerId.decode(identity)
        if peer is None or peer.kind not in self._codecs:
            self.counters.dropped[DropReason.UNKNOWN_PEER] += 1
            return
        message = self._codecs[peer.kind].decode(frames)
        if isinstance(message, DropReason):
            self.counters.dropped[message] += 1
            if self.counters.dropped[message].bit_count() == 1:  # the 1st, 2nd, 4th, 8th...: a flood fills no log
                logger.warning("dropped a frame of %s: %s", peer, message.value)
            return
        assert self._handler is not None
        try:
            self._handler(peer, message)
        except Exception:  # one peer's message must not end the head and with it every stream
            self.counters.dropped[DropReason.FAILED] += 1
            logger.exception("handling %s of %s failed", type(message).__name__, peer)

    def _read_monitor(self) -> None:
        while self._loop is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.counters.handshakes += 1
            elif event & FAILED_EVENTS:
                self.counters.refused += 1
            elif event == zmq.EVENT_DISCONNECTED:
                self.counters.disconnects += 1
