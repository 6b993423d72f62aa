"""Which cache blocks each slot holds, per cache group: on the host to compute slot mappings, on the device for kernels.

The host table is the truth; the device's copy follows by deltas, so that a long table is never sent again. On a CPU
there is one table. Knows nothing of who owns a block (that is the scheduler's pool). Owned by `SlotTable`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonar.messages import NewBlocks
from sonar.worker.upload import upload


class BlockTables:
    """Owns the tables (slots, blocks of the longest request) of every cache group.

    Args:
        num_groups: cache groups. num_slots: slots of the rank. max_blocks: blocks of the longest request.
        device: where kernels read.
    """

    def __init__(self, num_groups: int, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.num_groups = num_groups
        self._device = device
        self._max_blocks = max_blocks
        shape = (num_groups, num_slots, max_blocks)
        # np.zeros is lazy: the pages of a row nobody uses are never touched.
        self._host: NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        self._on_device: Tensor | None = None
        if device.type != "cpu":
            self._on_device = torch.zeros(shape, dtype=torch.int32, device=device)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest request."""
        return self._max_blocks

    def apply(self, new_blocks: list[NewBlocks]) -> None:
        """Appends blocks to tables. A table entry is written before any step reads it, so none is ever cleared."""
        if not new_blocks:
            return
        for new in new_blocks:
            end = new.start + len(new.block_ids)
            assert end <= self._max_blocks, f"slot {new.slot} grows to {end} blocks of {self._max_blocks}"
            self._host[new.group, new.slot, new.start : end] = new.block_ids
        if self._on_device is not None:
            self._send(new_blocks, self._on_device)

    def lookup(self, group: int, slots: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Block ids of the tables' entries (slot, column), int64."""
        table = self._host[group].reshape(-1)
        block_ids: NDArray[np.int64] = table[slots * self._max_blocks + columns].astype(np.int64)
        return block_ids

    def gather(self, group: int, slots: NDArray[np.int64], slots_R: Tensor, num_columns: int) -> Tensor:
        """The first columns of the slots' tables as block_table_RB (int32) on the device.

        Args:
            slots, slots_R: the same slots, on the host and on the device.
            num_columns: B, columns of the longest table among them.
        """
        if self._on_device is None:
            return torch.from_numpy(self._host[group, slots, :num_columns])
        return self._on_device[group, :, :num_columns].index_select(0, slots_R)

    def _send(self, new_blocks: list[NewBlocks], on_device: Tensor) -> None:
        _, num_slots, max_blocks = self._host.shape
        starts = [(new.group * num_slots + new.slot) * max_blocks + new.start for new in new_blocks]
        index = np.concatenate(
            [np.arange(at, at + len(new.block_ids), dtype=np.int64) for at, new in zip(starts, new_blocks)]
        )
        ids = np.concatenate([np.array(new.block_ids, dtype=np.int32) for new in new_blocks])
        index_N, ids_N = upload([index, ids], self._device)
        on_device.view(-1).index_copy_(0, index_N, ids_N)
