"""gpt_oss's experts, which its checkpoints stack: dense, or in MXFP4, handed out one by one.

Stored, X experts, D hidden, F features; gate and up rows alternate:
    dense: gate_up_proj (X, D, 2 F), down_proj (X, F, D), each expert's matrix turned round
    MXFP4: gate_up_proj_blocks (X, 2 F, D / 32, 16), gate_up_proj_scales (X, 2 F, D / 32); the same of down_proj (D, F)
    biases: gate_up_proj_bias (X, 2 F), down_proj_bias (X, D)
A block of MXFP4 (OCP Microscaling Formats 1.0, section 5.3) is 32 numbers of 4 bits (E2M1) with a scale of 8 (E8M0).
Here neighbours share a byte; in GGUF, whose order the ops know, numbers 16 apart do. Called by `SafetensorsWeights`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sonar.ops.table import GGUFMatrix, Matrix, PlainMatrix

_NAME = re.compile(r"(.+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_BLOCK = 32


class _Place(NamedTuple):
    """Where an expert's tensor is: stacked under name, that expert, every so many rows from start."""

    name: str
    expert: int
    start: int
    step: int


class FusedExperts:
    """Views and copies of one expert's tensors.

    Args:
        load: (name, shape) -> the stored tensor, or `ModelError`. has: whether there is such a tensor.
        num_experts: X.
    """

    def __init__(
        self, load: Callable[[str, tuple[int, ...]], Tensor], has: Callable[[str], bool], num_experts: int
    ) -> None:
        self._load = load
        self._has = has
        self._num_experts = num_experts

    def owns(self, name: str) -> bool:
        """Whether this is an expert's tensor."""
        return _NAME.fullmatch(name) is not None

    def bias(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """(N,), as stored."""
        place = _find(name)
        stacked = self._load(f"{place.name}_bias", (self._num_experts, shape[0] * place.step))
        return stacked[place.expert, place.start :: place.step]

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """(N, K): dense, or MXFP4 in GGUF's layout."""
        place, (num_rows, num_columns) = _find(name), shape
        if not self._has(f"{place.name}_blocks"):
            stacked = self._load(place.name, (self._num_experts, num_columns, num_rows * place.step))
            return PlainMatrix(stacked[place.expert, :, place.start :: place.step].t().contiguous())
        whole = (self._num_experts, num_rows * place.step, num_columns // _BLOCK)
        blocks = self._load(f"{place.name}_blocks", (*whole, _BLOCK // 2))
        scales = self._load(f"{place.name}_scales", whole)
        rows = (place.expert, slice(place.start, None, place.step))
        return GGUFMatrix(_to_gguf(blocks[rows], scales[rows]), "MXFP4", num_columns)


def _find(name: str) -> _Place:
    found = _NAME.fullmatch(name)
    assert found is not None, f"{name} is no expert's tensor"
    prefix, expert, part, _ = found.groups()
    if part == "down":
        return _Place(f"{prefix}down_proj", int(expert), 0, 1)
    return _Place(f"{prefix}gate_up_proj", int(expert), int(part == "up"), 2)


def _to_gguf(blocks_NB16: Tensor, scales_NB: Tensor) -> Tensor:
    """uint8 (N, B * 17): of each block its scale, then numbers 0 to 15 in the low halves of bytes, 16 to 31 in the high
    ones."""
    numbers_NBX = torch.stack((blocks_NB16 & 15, blocks_NB16 >> 4), dim=-1).flatten(2)
    packed_NBX = numbers_NBX[..., :16] | (numbers_NBX[..., 16:] << 4)
    return torch.cat((scales_NB.unsqueeze(-1), packed_NBX), dim=-1).flatten(1)
