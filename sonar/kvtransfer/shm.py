"""The transport `shm`: between processes of one host, the kernel copies from the peer's memory (process_vm_readv).

One copy, no set-up, and the cache stays where it is (on huge pages, if it is). Needs one host, one process namespace
and the right to read the other process: what it lacks, `connect` says. A process id may be given again: each side keeps
a secret word in its memory, and a read counts only if the word is there before and after it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from functools import partial

import msgspec

from sonar.kvtransfer.contract import Piece, Reading, Region, TransferError
from sonar.kvtransfer.readings import ReadThread

# The kernel takes at most this many pieces a call (UIO_MAXIOV).
_MAX_PIECES = 1024
_WORD_BYTES = 16


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """word_address: where `word` lies in the process."""

    pid: int
    word_address: int
    word: bytes


class ShmTransport:
    """Implements `Transport`. name: not needed, addresses are the process's own."""

    def __init__(self, name: str) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.process_vm_readv.restype = ctypes.c_ssize_t
        self._word = ctypes.create_string_buffer(secrets.token_bytes(_WORD_BYTES), _WORD_BYTES)
        self._peers: dict[str, tuple[_Metadata, ReadThread]] = {}

    def register(self, regions: Sequence[Region]) -> None:
        allow = getattr(self._libc, "prctl", None)
        if allow is not None:
            # Where the system lets only parents read a process (yama), this lets those of the same user.
            allow(0x59616D61, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(_Metadata(os.getpid(), ctypes.addressof(self._word), self._word.raw))

    def connect(self, peer: str, metadata: bytes) -> None:
        try:
            known = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.MsgspecError as error:
            raise TransferError(f"{peer}: metadata of another transport: {error}") from error
        self._check_word(known)
        self.disconnect(peer)
        self._peers[peer] = known, ReadThread(f"kv-shm {peer}")

    def read(self, peer: str, pieces: Sequence[Piece]) -> Reading:
        known, thread = self._peers[peer]
        return thread.submit(partial(self._copy, known, list(pieces)))

    def disconnect(self, peer: str) -> None:
        if peer in self._peers:
            self._peers.pop(peer)[1].end()

    def close(self) -> None:
        threads = [thread for _, thread in self._peers.values()]
        self._peers.clear()
        for thread in threads:
            thread.end()
        for thread in threads:
            thread.join()

    def _copy(self, known: _Metadata, pieces: list[Piece]) -> None:
        self._check_word(known)
        for first in range(0, len(pieces), _MAX_PIECES):
            self._copy_some(known.pid, pieces[first : first + _MAX_PIECES])
        self._check_word(known)

    def _copy_some(self, pid: int, pieces: list[Piece]) -> None:
        count = len(pieces)
        local = (_IoVec * count)(*(_IoVec(piece.local, piece.size_bytes) for piece in pieces))
        remote = (_IoVec * count)(*(_IoVec(piece.remote, piece.size_bytes) for piece in pieces))
        wanted = sum(piece.size_bytes for piece in pieces)
        copied = self._libc.process_vm_readv(pid, local, count, remote, count, 0)
        if copied < 0:
            code = ctypes.get_errno()
            raise TransferError(f"process {pid} cannot be read: {os.strerror(code)}")
        if copied != wanted:
            raise TransferError(f"process {pid}: {copied} of {wanted} bytes were there")

    def _check_word(self, known: _Metadata) -> None:
        found = ctypes.create_string_buffer(_WORD_BYTES)
        self._copy_some(known.pid, [Piece(ctypes.addressof(found), known.word_address, _WORD_BYTES)])
        if found.raw != known.word:
            raise TransferError(f"process {known.pid} is another one than it was")
