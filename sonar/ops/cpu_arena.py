"""Memory for packed weights: large anonymous maps on huge pages, handed out piece by piece.

Huge pages give a third more read bandwidth, and most matrices of a small model are smaller than one page of 2 MiB: they
share. Called by `sonar.ops.cpu_matrix`.
"""

from __future__ import annotations

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
            self._chunk, self._used = _map(max(num_bytes, _CHUNK)), 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece


def _map(num_bytes: int) -> Tensor:
    """A map aligned to a huge page."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE_PAGE
    return whole[skip : skip + num_bytes]
