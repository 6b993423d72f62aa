"""Options and events that both ends of a control link set alike. Called by the transport's client and server."""

from __future__ import annotations

import zmq

from sonar.transport import Address, TransportSettings

FAILED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
WATCHED_EVENTS = FAILED_EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def set_common_options(zmq_socket: zmq.Socket[bytes], address: Address, settings: TransportSettings) -> None:
    """Limits and times of `settings` on a socket that will use `address`."""
    zmq_socket.setsockopt(zmq.IPV6, int(address.needs_ipv6))
    zmq_socket.setsockopt(zmq.LINGER, settings.linger_ms)
    zmq_socket.setsockopt(zmq.SNDHWM, settings.send_queue)
    zmq_socket.setsockopt(zmq.RCVHWM, settings.receive_queue)
    zmq_socket.setsockopt(zmq.MAXMSGSIZE, 4 * settings.max_frame_bytes)
    zmq_socket.setsockopt(zmq.HANDSHAKE_IVL, settings.handshake_ms)
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, settings.heartbeat_ms)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, settings.heartbeat_timeout_ms)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TTL, settings.heartbeat_timeout_ms)
    zmq_socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
