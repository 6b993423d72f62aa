"""Host memory on huge pages: for the KV cache as one map, for packed weights handed out piece by piece.

Huge pages give a third more read bandwidth, and attention, which jumps from block to block, half of its time. Most
matrices of a small model are smaller than one page of 2 MiB: they share. Knows nothing of what it holds. Called by
`sonar.ops.cpu_matrix` and `sonar.worker.kv_cache`.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_ALIGNMENT = 64


class Arena:
    """Owns the map that pieces are cut from; each piece keeps its map alive. Pages are taken when first written."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 of that length, aligned to 64 bytes, zeros."""
        if self._used + num_bytes > self._chunk.shape[0]:
            self._chunk, self._used = map_zeros(max(num_bytes, _CHUNK)), 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece


def map_zeros(num_bytes: int) -> Tensor:
    """uint8 zeros in a map of their own, aligned to a huge page. The system takes a page when it is first written.

    Raises:
        MemoryError: the host refused.
    """
    try:
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; a kernel built without them refuses
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE_PAGE
    return whole[skip : skip + num_bytes]
