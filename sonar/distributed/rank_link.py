"""A rank's own connection to the head: requests to the incarnation's store, and the word that this rank has failed.

Any thread may call; one request is under way at a time. Torch-free. Owned by the rank's process; used by
`sonar.distributed.store`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from sonar.errors import RemoteError
from sonar.messages import Fault, StoreReply, StoreRequest
from sonar.transport import Address, PeerId, PeerKind
from sonar.transport_client import Client

CONNECT_TIMEOUT_S = 30.0
# What the head may take to answer beyond the wait that a request asks for.
REPLY_TIMEOUT_S = 30.0
FAULT_LINGER_MS = 2000


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of what this is, and where its head listens, or others that may lead instead."""

    head_host: str
    head_port: int
    token: str
    replica_id: str
    incarnation: int
    rank: int
    world_size: int
    other_heads: list[Address] = []


class RankLink:
    """Owns the connection.

    Raises:
        HandshakeRefusedError, UnreachableError: see `Client.connect`.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        peer = PeerId(PeerKind.RANK, f"{spec.replica_id}/{spec.rank}", spec.incarnation)
        head = Address(spec.head_host, spec.head_port)
        self._client = Client(head, spec.token, peer, StoreReply, others=spec.other_heads)
        self._lock = threading.Lock()
        self._number = 0
        self._client.connect(CONNECT_TIMEOUT_S)

    def ask(self, make: Callable[[int], StoreRequest], timeout_s: float = 0.0) -> StoreReply:
        """Sends a request and waits for its reply.

        Args:
            make: the request of a number. timeout_s: that the head may wait by the request's own word.

        Raises:
            RemoteError: the head did not answer.
        """
        with self._lock:
            self._number += 1
            request = make(self._number)
            self._client.send(request)
            deadline_s = time.monotonic() + timeout_s + REPLY_TIMEOUT_S
            while (left_s := deadline_s - time.monotonic()) > 0:
                replies: list[StoreReply] = self._client.receive(min(left_s, 1.0))
                for reply in replies:
                    if reply.number == self._number:
                        return reply
                if self._client.take_reconnected():
                    self._client.send(request)  # it or its reply may have been lost
        raise RemoteError(
            f"the head did not answer {type(request).__name__} within {timeout_s + REPLY_TIMEOUT_S:g} s",
            rank=self.spec.rank,
        )

    def report(self, step: int, error: str, traceback: str, *, is_user_error: bool) -> None:
        """Tells the head that this rank is over, and closes."""
        fault = Fault(
            incarnation=self.spec.incarnation,
            rank=self.spec.rank,
            step=step,
            error=error[:4000],
            traceback=traceback[-16000:],
            is_user_error=is_user_error,
        )
        self._client.send(fault)
        self._client.close(FAULT_LINGER_MS)

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._client.close(0)
