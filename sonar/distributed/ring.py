"""A ring of frames in shared memory: one writer, some readers, every frame read by each, in order.

The memory is a memfd, so that nothing is left on the host when the processes end, however they end. A reader's position
is its acknowledgement: the writer never overwrites what one has not read, and gives up on a reader that stands still.
Each frame carries a checksum; a wrong one raises. Frames are bytes: what they mean is the caller's. Called by
`step_link`.

Layout: one page of header (word 0: pieces written, the futex; from byte 64 a 64-bit position a reader), then the ring.
A frame travels in pieces of [size u32, crc32 u32, bytes], the size's highest bit set while more follow; positions count
bytes since the start, so they tell "full" from "empty".
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib

from sonar.distributed.futex import FutexWord
from sonar.errors import ProtocolError

CAPACITY = 8 << 20
MAX_READERS = 256
_HEADER = 4096
_POSITIONS = 64
_PIECE = struct.Struct("<II")
_MORE = 1 << 31
_POSITION = struct.Struct("<Q")
_FULL_SLEEP_S = 0.0002
_PIECE_TIMEOUT_S = 30.0


class RingWriter:
    """Owns the memory.

    Args:
        num_readers: all of whom read every frame.

    Attributes:
        descriptor: of the memory; a reader of this host opens it by this process's id.
    """

    def __init__(self, num_readers: int, capacity: int = CAPACITY) -> None:
        assert 1 <= num_readers <= MAX_READERS, num_readers
        self.descriptor = os.memfd_create("sonar-ring", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, _HEADER + capacity)
        self._num_readers = num_readers
        self._capacity = capacity
        self._ring = _Ring(self.descriptor, capacity)
        self._position = 0
        self._count = 0

    def write(self, frame: bytes, timeout_s: float) -> None:
        """Appends a frame and wakes the readers; one larger than the ring goes through it in pieces.

        Raises:
            ProtocolError: a reader left no room for it within the time.
        """
        largest = self._capacity // 4
        pieces = [frame[first : first + largest] for first in range(0, len(frame), largest)] or [b""]
        for number, piece in enumerate(pieces):
            self._write_piece(piece, timeout_s, _MORE if number < len(pieces) - 1 else 0)

    def _write_piece(self, piece: bytes, timeout_s: float, more: int) -> None:
        needed = _PIECE.size + len(piece)
        self._wait_for_room(needed, timeout_s)
        self._ring.put(self._position, _PIECE.pack(len(piece) | more, zlib.crc32(piece)))
        self._ring.put(self._position + _PIECE.size, piece)
        self._position += needed
        self._count += 1
        self._ring.word.set_and_wake(self._count)

    def unread_bytes(self) -> int:
        """Bytes that the slowest reader has not taken."""
        return self._position - min(self._ring.position(reader) for reader in range(self._num_readers))

    def close(self) -> None:
        """Frees the memory here; readers keep theirs."""
        self._ring.close()
        os.close(self.descriptor)

    def _wait_for_room(self, needed: int, timeout_s: float) -> None:
        deadline_s = None
        while self.unread_bytes() + needed > self._capacity:
            now = time.monotonic()
            deadline_s = deadline_s or now + timeout_s
            if now > deadline_s:
                slow = [r for r in range(self._num_readers) if self._ring.position(r) + self._capacity
                        < self._position + needed]  # fmt: skip
                raise ProtocolError(f"readers {slow} took nothing from the ring for {timeout_s:g} s")
            time.sleep(_FULL_SLEEP_S)


class RingReader:
    """One reader's end.

    Args:
        pid, descriptor: of the writer. reader: its number, from 0.
    """

    def __init__(self, pid: int, descriptor: int, reader: int, capacity: int = CAPACITY) -> None:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._ring = _Ring(opened, capacity)
        finally:
            os.close(opened)
        self._reader = reader
        self._position = 0
        self._count = 0

    def read(self, timeout_s: float) -> bytes | None:
        """The next frame; None when none came within the time.

        Raises:
            ProtocolError: the frame is damaged, or stopped half way.
        """
        piece = self._read_piece(timeout_s)
        if piece is None:
            return None
        data, has_more = piece
        if not has_more:
            return data
        pieces = [data]
        while has_more:
            piece = self._read_piece(_PIECE_TIMEOUT_S)
            if piece is None:
                raise ProtocolError(f"the rest of a frame did not come within {_PIECE_TIMEOUT_S:g} s")
            data, has_more = piece
            pieces.append(data)
        return b"".join(pieces)

    def _read_piece(self, timeout_s: float) -> tuple[bytes, bool] | None:
        if self._ring.word.value == self._count & 0xFFFFFFFF:
            self._ring.word.wait(self._count & 0xFFFFFFFF, timeout_s)
            if self._ring.word.value == self._count & 0xFFFFFFFF:
                return None
        size, checksum = _PIECE.unpack(self._ring.get(self._position, _PIECE.size))
        has_more, size = bool(size & _MORE), size & ~_MORE
        if size > self._ring.capacity:
            raise ProtocolError(f"piece {self._count} of the ring states {size} bytes")
        piece = self._ring.get(self._position + _PIECE.size, size)
        if zlib.crc32(piece) != checksum:
            raise ProtocolError(f"piece {self._count} of the ring is damaged")
        self._position += _PIECE.size + size
        self._count += 1
        self._ring.acknowledge(self._reader, self._position)
        return piece, has_more

    def close(self) -> None:
        """Frees the memory here."""
        self._ring.close()


class _Ring:
    """The mapped memory: bytes at positions that wrap around, and the readers' positions."""

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.capacity = capacity
        self._map = mmap.mmap(descriptor, _HEADER + capacity)
        self._memory = memoryview(self._map)
        self.word = FutexWord(self._memory, 0)

    def put(self, position: int, data: bytes) -> None:
        start = position % self.capacity
        first = min(len(data), self.capacity - start)
        self._memory[_HEADER + start : _HEADER + start + first] = data[:first]
        if first < len(data):
            self._memory[_HEADER : _HEADER + len(data) - first] = data[first:]

    def get(self, position: int, size: int) -> bytes:
        start = position % self.capacity
        first = min(size, self.capacity - start)
        data = bytes(self._memory[_HEADER + start : _HEADER + start + first])
        return data if first == size else data + bytes(self._memory[_HEADER : _HEADER + size - first])

    def position(self, reader: int) -> int:
        value: int = _POSITION.unpack_from(self._memory, _POSITIONS + 8 * reader)[0]
        return value

    def acknowledge(self, reader: int, position: int) -> None:
        _POSITION.pack_into(self._memory, _POSITIONS + 8 * reader, position)

    def close(self) -> None:
        self.word.close()
        self._memory.release()
        self._map.close()
