"""The control links of a simulation: real names and real frames, no sockets. What `sonar.transport_server` does for a
head, on a timeline: encode, decode, drop junk, hand over. Charges the head's part to a meter.

Knows neither agents nor engines; they connect with a function that takes frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cluster.messages import AgentToHead
from cluster.sim.meter import Meter
from cluster.sim.timeline import Timeline
from sonar.messages import LeadToHead
from sonar.transport import Codec, DropReason, PeerId, PeerKind, TransportCounters, TransportSettings
from sonar.transport_server import MessageHandler

LATENCY_S = 0.0005
Receiver = Callable[[bytes], None]


class Connection:
    """One peer's link. Frames in flight are lost when it breaks."""

    def __init__(self, link: SimLink, identity: bytes, receive: Receiver) -> None:
        self.is_open = True
        self._link = link
        self._identity = identity
        self._receive = receive

    def send(self, frame: bytes) -> None:
        """To the head, after the network's latency."""
        self._link.timeline.after(LATENCY_S, lambda: self._link.arrive(self._identity, frame) if self.is_open else None)

    def deliver(self, frame: bytes) -> None:
        """From the head, likewise."""
        self._link.timeline.after(LATENCY_S, lambda: self._receive(frame) if self.is_open else None)

    def close(self) -> None:
        """The peer has gone, or cannot be reached."""
        self.is_open = False
        self._link.forget(self._identity, self)


class SimLink:
    """The head's end of all links; implements `cluster.control.ControlLink`.

    Attributes:
        meter: where the head's work is charged; replaced at the begin of a phase.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.counters = TransportCounters()
        self.timeline = timeline
        self.meter = Meter()
        size_bytes = TransportSettings().max_frame_bytes
        self._codecs: Mapping[PeerKind, Codec] = {
            PeerKind.AGENT: Codec(AgentToHead, size_bytes),
            PeerKind.LEAD: Codec(LeadToHead, size_bytes),
        }
        self._connections: dict[bytes, Connection] = {}
        self._handler: MessageHandler | None = None

    def open(self, handler: MessageHandler) -> None:
        """Begins to hand messages over."""
        self._handler = handler

    def connect(self, peer: PeerId, receive: Receiver) -> Connection:
        """A peer's (new) connection; an older one of that name breaks."""
        identity = peer.encode()
        old = self._connections.get(identity)
        if old is not None:
            old.close()
        connection = self._connections[identity] = Connection(self, identity, receive)
        return connection

    def forget(self, identity: bytes, connection: Connection) -> None:
        """A connection has ended."""
        if self._connections.get(identity) is connection:
            del self._connections[identity]

    def send(self, peer: PeerId, message: msgspec.Struct) -> bool:
        """See `sonar.transport_server.Server.send`."""
        frame = self._codecs[peer.kind].encode(message)
        connection = self._connections.get(peer.encode())
        if connection is None:
            self.counters.unsent += 1
            return False
        self.counters.sent += 1
        connection.deliver(frame)
        return True

    def arrive(self, identity: bytes, frame: bytes) -> None:
        """A frame has come in: the head's work begins here."""
        assert self._handler is not None
        began_ns = time.thread_time_ns()
        self.counters.received += 1
        peer = PeerId.decode(identity)
        if peer is None:
            self.counters.dropped[DropReason.UNKNOWN_PEER] += 1
            return
        message: Any = self._codecs[peer.kind].decode([frame])
        if isinstance(message, DropReason):
            self.counters.dropped[message] += 1
            return
        self._handler(peer, message)
        self.meter.add(type(message).__name__, time.thread_time_ns() - began_ns)
