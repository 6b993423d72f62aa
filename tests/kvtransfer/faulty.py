"""A transport between engines of one process, with faults on demand: late, lost, half done or wrong reads.

Its bytes are copied by a plain memmove, one step at a time, when the test says so: what is under way is under the
test's control. Called by the tests of transfers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sonar.kvtransfer.contract import Piece, ReadState, Region, TransferError


class FaultKind(Enum):
    """LATE: not before `release_late`. LOST: never; the transport says so at `release_late`. HALF: some pieces come,
    then it fails. WRONG: all come, one byte is another. REFUSED: fails at once."""

    NONE = "none"
    LATE = "late"
    LOST = "lost"
    HALF = "half"
    WRONG = "wrong"
    REFUSED = "refused"


@dataclass
class FakeReading:
    """A read under the test's control (`Reading`)."""

    pieces: list[Piece]
    fault: FaultKind
    state: ReadState = ReadState.UNDER_WAY
    error: str = ""

    def finish(self) -> None:
        """What the fault lets happen."""
        count = len(self.pieces) // 2 if self.fault is FaultKind.HALF else len(self.pieces)
        if self.fault is not FaultKind.REFUSED:
            for piece in self.pieces[:count]:
                ctypes.memmove(piece.local, piece.remote, piece.size_bytes)
        if self.fault is FaultKind.WRONG:
            first = ctypes.cast(self.pieces[0].local, ctypes.POINTER(ctypes.c_ubyte))
            first[self.pieces[0].size_bytes // 2] ^= 0x40
        is_whole = self.fault not in (FaultKind.HALF, FaultKind.REFUSED)
        self.error = "" if is_whole else f"injected: {self.fault.value}"
        self.state = ReadState.DONE if is_whole else ReadState.FAILED


@dataclass
class FakeNetwork:
    """Owns the reads of all transports made on it. choose: the fault of the next read."""

    choose: Callable[[], FaultKind] = lambda: FaultKind.NONE
    under_way: list[FakeReading] = field(default_factory=list)

    def step(self) -> None:
        """Every read that is not held back ends."""
        for reading in self.under_way:
            if reading.fault not in (FaultKind.LATE, FaultKind.LOST):
                reading.finish()
        self.under_way = [reading for reading in self.under_way if reading.state is ReadState.UNDER_WAY]

    def release_late(self) -> None:
        """The late ones end too, maybe long after anyone waited for them."""
        for reading in self.under_way:
            if reading.fault is FaultKind.LATE:
                reading.finish()
            elif reading.fault is FaultKind.LOST:
                reading.error, reading.state = "injected: lost", ReadState.LOST
        self.step()


class FakeTransport:
    """Implements `Transport` over a `FakeNetwork`."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network
        self.peers: set[str] = set()

    def register(self, regions: Sequence[Region]) -> None:
        self.regions = list(regions)

    def metadata(self) -> bytes:
        return b"fake"

    def connect(self, peer: str, metadata: bytes) -> None:
        if metadata != b"fake":
            raise TransferError(f"{peer}: not a fake")
        self.peers.add(peer)

    def read(self, peer: str, pieces: Sequence[Piece]) -> FakeReading:
        assert peer in self.peers, peer
        for piece in pieces:
            inside = [r for r in self.regions if r.address <= piece.local < r.address + r.size_bytes]
            assert inside, "a read outside of what was registered"
        reading = FakeReading(list(pieces), self._network.choose())
        self._network.under_way.append(reading)
        return reading

    def disconnect(self, peer: str) -> None:
        self.peers.discard(peer)

    def close(self) -> None:
        self.peers.clear()
