"""Moves a step's small host arrays to the device: one pinned copy for all of them on CUDA, none at all on a CPU.

Deliberately knows nothing of what the arrays mean. Called by inputs, sampler, history and block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN_BYTES = 16
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Returns each array as a tensor on `device`, same shapes and types.

    On a CPU the tensors share the arrays' memory, so the caller must not write to them afterwards. On CUDA the arrays
    are packed in one pinned buffer and copied without a wait; torch's pinned allocator keeps that buffer from reuse
    until the copy is done, so a second step may be prepared meanwhile.

    Args:
        arrays: int64, int32, float32 or bool, C-contiguous.
        device: where the tensors go.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    offsets, total = _layout(arrays)
    staging = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    host = staging.numpy()
    for array, offset in zip(arrays, offsets):
        host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    packed = staging.to(device, non_blocking=True)
    return [
        packed[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for array, offset in zip(arrays, offsets)
    ]


def _layout(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Byte offset of each array in the packed buffer, and its size; each starts aligned for any element type."""
    offsets: list[int] = []
    end = 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return offsets, max(end, _ALIGN_BYTES)
