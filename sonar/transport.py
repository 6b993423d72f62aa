"""What both ends of a control link share: addresses, peer names, limits, counters, and the codec.

Links are ZMQ over TCP: one ROUTER in the head (`sonar.transport_server`), a DEALER in each agent and lead
(`sonar.transport_client`), CURVE on every socket with keys from the join token (`sonar.transport_keys`). A frame is one
MessagePack message; a head's comes with its epoch, and who has heard of a later head obeys no earlier one. Whatever
does not decode, is too long, or comes from an unknown peer is counted and dropped: a network cannot stop a process.
Knows nothing of what the messages mean. Torch-free.
"""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from sonar.errors import ConfigError, ProtocolError, SonarError

PROTOCOL_VERSION = 2
# In front of each frame from a head: its epoch, big-endian.
EPOCH_BYTES = 8
MAX_NAME_BYTES = 160


class HandshakeRefusedError(SonarError):
    """Something listens at the address, and does not accept this process's key."""


class UnreachableError(SonarError):
    """Nothing answered at the address within the deadline."""


@dataclass(frozen=True)
class TransportSettings:
    """Limits and times of a link. Both ends may differ; the defaults suit loopback and a data centre.

    Attributes:
        max_frame_bytes: a longer frame is counted and dropped; libzmq itself cuts a connection that sends four times
            as much, before it allocates for it.
        send_queue, receive_queue: messages held a peer and direction; a full send queue makes `send` return False.
        heartbeat_ms, heartbeat_timeout_ms: libzmq's own pings. They tell a lost network or host from a quiet peer; that
            the peer's loop still turns is shown by the messages themselves.
        reconnect_ms, reconnect_max_ms: first and longest wait between attempts to connect again.
        handshake_ms: a connection that has not proved its key by then is closed.
        linger_ms: how long closing waits for unsent messages.
    """

    max_frame_bytes: int = 16 << 20
    send_queue: int = 8192
    receive_queue: int = 8192
    heartbeat_ms: int = 1000
    heartbeat_timeout_ms: int = 3000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 1000
    handshake_ms: int = 5000
    linger_ms: int = 500


class Address(NamedTuple):
    """Where a head listens. host: a name, an IPv4 or an IPv6 address (without brackets)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """As ZMQ writes it."""
        return f"tcp://{self}"

    @property
    def needs_ipv6(self) -> bool:
        """Whether only IPv6 leads there. Names are asked for; one that does not resolve (yet) counts as IPv4."""
        if ":" in self.host:
            return True
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:
            return False
        return all(family == socket.AF_INET6 for family, *_ in found)

    def is_at(self, endpoint: str) -> bool:
        """Whether an endpoint, with a numeric address as ZMQ's monitor writes it, is this one."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]")
        if port != str(self.port) or host == self.host:
            return port == str(self.port)
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:
            return False
        return host in {str(place[0]) for *_, place in found}


def parse_address(text: str, default_port: int) -> Address:
    """Reads "host", "host:port", "1.2.3.4:port", "::1" or "[::1]:port".

    Raises:
        ConfigError: it is none of these.
    """
    host, port = text.strip(), str(default_port)
    if host.startswith("["):
        host, bracket, rest = host[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ConfigError(f"address {text!r}: write an IPv6 address with port as [::1]:{default_port}")
        port = rest[1:] or port
    elif host.count(":") == 1:
        host, port = host.split(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"address {text!r} is no HOST or HOST:PORT; give e.g. head-1:{default_port}")
    return Address(host, int(port))


def parse_addresses(text: str, default_port: int) -> tuple[Address, ...]:
    """Reads one address or several, separated by commas: those of heads of which one leads.

    Raises:
        ConfigError: one of them is no address, or is there twice.
    """
    addresses = tuple(parse_address(item, default_port) for item in text.split(","))
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"address {text!r}: one of them is there twice; name each head once")
    return addresses


class PeerKind(Enum):
    """Who speaks to a head. STANDBY: another head, which is to know what this one has answered."""

    AGENT = "agent"
    LEAD = "lead"
    RANK = "rank"
    OPERATOR = "operator"
    STANDBY = "standby"


class PeerId(NamedTuple):
    """Name of one process on a link; it is also the connection's ZMQ identity, so it survives a reconnect.

    name: node id, replica id, or for a rank "<replica id>/<rank>". generation: a lead's or rank's incarnation; an
    agent's number of this start. No later process takes an earlier one's name.
    """

    kind: PeerKind
    name: str
    generation: int

    def encode(self) -> bytes:
        """At most 255 bytes, as ZMQ allows."""
        encoded = f"{self.kind.value}/{self.generation}/{self.name}".encode()
        assert len(encoded) <= 255, f"peer name too long: {encoded!r}"
        return encoded

    @classmethod
    def decode(cls, identity: bytes) -> PeerId | None:
        """None when a stranger made the identity up."""
        try:
            kind, generation, name = identity.decode().split("/", 2)
            return cls(PeerKind(kind), name, int(generation)) if name else None
        except ValueError:
            return None


class DropReason(Enum):
    """Why a frame was not handled."""

    JUNK = "junk"
    OVERSIZED = "oversized"
    UNKNOWN_PEER = "unknown_peer"
    STALE = "stale_incarnation"
    DEPOSED = "deposed_head"
    REPEATED = "repeated"
    FAILED = "handler_failed"


@dataclass
class TransportCounters:
    """What a link has seen since it began; owned by the link, read by metrics.

    Attributes:
        dropped: frames by reason. refused: connections whose key was wrong. unsent: messages that `send` gave back.
    """

    received: int = 0
    sent: int = 0
    unsent: int = 0
    refused: int = 0
    handshakes: int = 0
    disconnects: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)


class Codec:
    """Encodes any message, decodes one closed union.

    Args:
        incoming: union of the tagged structs that may arrive.
    """

    def __init__(self, incoming: Any, max_frame_bytes: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._max_frame_bytes = max_frame_bytes

    def encode(self, message: msgspec.Struct) -> bytes:
        """Raises `ProtocolError` when the other side would drop the frame as too long."""
        frame = self._encoder.encode(message)
        if len(frame) > self._max_frame_bytes:
            name = type(message).__name__
            raise ProtocolError(f"{name} takes {len(frame)} bytes; a frame holds {self._max_frame_bytes}")
        return frame

    def decode(self, frames: list[bytes]) -> msgspec.Struct | DropReason:
        """The message, or why there is none."""
        if len(frames) != 1:
            return DropReason.JUNK
        if len(frames[0]) > self._max_frame_bytes:
            return DropReason.OVERSIZED
        try:
            message: msgspec.Struct = self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, SonarError, ValueError, RecursionError):
            # SonarError: a struct's own check, e.g. SamplingParams out of range. ValueError: text that is no UTF-8.
            return DropReason.JUNK
        return message
