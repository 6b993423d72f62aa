"""One-way channels of frames from a rank to others: the contract, and the choice between its members.

Every reader gets every frame, in order; reading acknowledges; a writer holds at most so much unread and gives up on a
reader that stands still. What a frame means is the caller's. Called by `step_link`.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Protocol

from sonar.distributed.ring import RingReader, RingWriter
from sonar.distributed.zmq_frames import ZmqReader, ZmqWriter
from sonar.transport import Address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class FrameWriter(Protocol):
    """The one end that writes."""

    def write(self, frame: bytes, timeout_s: float) -> None:
        """Raises `ProtocolError` when a reader is gone or took nothing for so long."""
        ...

    def close(self) -> None:
        """No further frame."""
        ...


class FrameReader(Protocol):
    """One of the ends that read."""

    def read(self, timeout_s: float) -> bytes | None:
        """The next frame, None when none came in time. Raises `ProtocolError` when one was lost or damaged."""
        ...

    def close(self) -> None:
        """No further reading."""
        ...


def open_writer(
    store: Store, name: str, num_readers: int, *, is_one_host: bool, own_host: str, token: str
) -> FrameWriter:
    """The writing end, announced in the store: shared memory on one host, CURVE ZMQ across.

    Args:
        own_host: address at which the others reach this host. token: the cluster's join token.
    """
    if is_one_host:
        ring = RingWriter(num_readers)
        store.set(f"frames/{name}", json.dumps(["ring", os.getpid(), ring.descriptor]))
        return ring
    writer = ZmqWriter(own_host, num_readers, token)
    store.set(f"frames/{name}", json.dumps(["zmq", *writer.address]))
    return writer


def open_reader(store: Store, name: str, reader: int, token: str) -> FrameReader:
    """The reading end number `reader`, of `num_readers` from 0; waits until the writer is announced."""
    kind, first, second = json.loads(store.get(f"frames/{name}"))
    if kind == "ring":
        return RingReader(int(first), int(second), reader)
    return ZmqReader(Address(str(first), int(second)), reader, token)
