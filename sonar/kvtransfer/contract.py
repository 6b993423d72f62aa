"""The contract of a KV transport: one replica reads memory that another has registered.

The reader owns a transfer: nobody ever writes into a peer's memory, so that a late or confused peer cannot spoil blocks
that have found other use. Knows nothing of blocks, requests or links. Called by `sonar.kvtransfer.exchange`; members
are in `sonar.kvtransfer.registry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from sonar.errors import SonarError


class TransferError(SonarError):
    """A peer's memory cannot be reached or read; the text says why. Never the client's fault."""


class Region(NamedTuple):
    """A piece of this process's memory."""

    address: int
    size_bytes: int


class Piece(NamedTuple):
    """Bytes to copy: from a peer's address to one of this process, both within registered regions."""

    local: int
    remote: int
    size_bytes: int


class LostReadError(TransferError):
    """A read was given up and may still write local memory, until its peer's process is known to have ended."""


class ReadState(Enum):
    """UNDER_WAY: local memory may still be written. DONE: all pieces are here. FAILED: some are not, none will come.
    LOST: given up, and some may still come: see `LostReadError`."""

    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


class Reading(Protocol):
    """A read that was posted.

    Attributes:
        error: why it failed.
    """

    error: str

    @property
    def state(self) -> ReadState:
        """How it stands; never waits."""
        ...


class Transport(Protocol):
    """One process's side. Calls come from one thread and never wait for a peer."""

    def register(self, regions: Sequence[Region]) -> None:
        """Makes memory readable for peers and writable for reads; once, before anything else. Raises TransferError."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to read here. Handed to it over an authenticated link."""
        ...

    def connect(self, peer: str, metadata: bytes) -> None:
        """Gets to know a peer under a name that stands for one start of its process. Raises TransferError."""
        ...

    def read(self, peer: str, pieces: Sequence[Piece]) -> Reading:
        """Begins to copy from a connected peer. Errors are told by the reading."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forgets a peer, known or not, whose process has ended."""
        ...

    def close(self) -> None:
        """Ends threads; the regions may be freed afterwards."""
        ...
