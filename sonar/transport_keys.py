"""Keys of the control links from one secret, and the gate that checks them.

Every process that holds the join token derives the same server and client key pairs (HKDF-SHA256, RFC 5869), so a
cluster is joined by copying one line. A server proves itself to a client and a client to the server; a stranger gets
neither past the handshake. Holders of the token trust each other: the token says "of this cluster", not "which host".
Does not read or make the token (`cluster.security`). Torch-free.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from typing import NamedTuple

import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"sonar"
_SALT = b"sonar control link 1"


class CurveKeys(NamedTuple):
    """A CURVE key pair in Z85, as ZMQ's options take it."""

    public: bytes
    secret: bytes


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """HKDF of RFC 5869 with SHA-256; length at most 8160 bytes."""
    key = hmac.digest(salt, secret, hashlib.sha256)
    block, output = b"", b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.digest(key, block + info + bytes([counter]), hashlib.sha256)
        output += block
    return output[:length]


def derive_keys(token: str, role: str) -> CurveKeys:
    """The key pair of a role ("server" or "client"). Any 32 bytes are a Curve25519 secret: its clamping is ZMQ's."""
    secret = z85.encode(hkdf_sha256(token.encode(), _SALT, b"curve " + role.encode()))
    return CurveKeys(public=zmq.curve_public(secret), secret=secret)


class KeyGate:
    """Answers libzmq's question "is this client's key allowed?" (ZAP, rfc.zeromq.org/spec/27) in a thread of its own.

    A thread, because libzmq asks while the event loop may be busy, and a handshake has a deadline. Start it before a
    server socket of the same context is bound; without it libzmq would let every key in.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed_key: bytes) -> None:
        self._allowed_key = z85.decode(allowed_key)
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)
        self._stop, self._stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stopped.bind("inproc://sonar.gate.stop")
        self._stop.connect("inproc://sonar.gate.stop")
        self._thread = threading.Thread(target=self._run, name="sonar-key-gate", daemon=True)

    def start(self) -> None:
        """From here on clients can be let in."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and its sockets."""
        if self._thread.ident is None:
            self._socket.close(0)
            self._stopped.close(0)
        else:
            self._stop.send(b"")
            self._thread.join(timeout=5)
        self._stop.close(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while not any(socket is self._stopped for socket, _ in poller.poll()):
            self._answer(self._socket.recv_multipart())
        self._socket.close(0)
        self._stopped.close(0)

    def _answer(self, request: list[bytes]) -> None:
        """Request frames: version, id, domain, address, identity, mechanism, credentials."""
        version, request_id = (*request, b"", b"")[:2]
        allowed = len(request) == 7 and request[5] == b"CURVE" and hmac.compare_digest(request[6], self._allowed_key)
        status = [b"200", b"OK"] if allowed else [b"400", b"unknown key"]
        self._socket.send_multipart([version, request_id, *status, b"", b""])
