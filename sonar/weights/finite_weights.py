"""A `WeightSource` that refuses tensors with numbers that are none: one NaN makes every answer of a model garbage.

Checks what is asked for, as it is asked for: the rank's own part, about to be read anyway. Of quantized matrices only
the blocks' float16 scales can be such numbers. Wraps any source; called by the worker's loader.
"""

from __future__ import annotations

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from sonar.errors import ModelError
from sonar.models.base import WeightSource
from sonar.ops.table import GGUFMatrix, Matrix, PlainMatrix

# Where a block's float16 scales begin, by the types' layouts in ggml: its scale, and its minimum where there is one.
_SCALE_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
# MXFP4's scale is an exponent of eight bits, at the block's begin; all ones is NaN.
_NO_EXPONENT = 0xFF
# A float16 is infinite or NaN when all bits of its exponent are set; they lie in its second byte.
_EXPONENT = 0x7C
# Numbers looked at in one go: the scratch is small, and the search ends at the first find.
_PIECE_NUMBERS = 1 << 22


class FiniteWeights:
    """Hands on what `source` gives.

    Raises (from `tensor` and `matrix`):
        ModelError: names the tensor that holds NaN or infinity.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return self._source.has(name)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See `WeightSource.tensor`."""
        tensor = self._source.tensor(name, shape, dtype)
        _refuse(name, _all_finite(tensor))
        return tensor

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.matrix`."""
        matrix = self._source.matrix(name, shape)
        is_sound = _all_finite(matrix.weight_NK) if isinstance(matrix, PlainMatrix) else _scales_finite(matrix)
        _refuse(name, is_sound)
        return matrix

    def unread(self) -> list[str]:
        """Tensors of the checkpoint that nothing asked for."""
        return self._source.unread()

    def sizes(self) -> dict[str, int]:
        """Bytes of each whole tensor as stored."""
        return self._source.sizes()


def _refuse(name: str, is_sound: bool) -> None:
    if not is_sound:
        raise ModelError(
            f"tensor {name!r} holds NaN or infinite values: the model's files are damaged; fetch them again",
            param="model",
        )


def _all_finite(tensor: Tensor) -> bool:
    """By the extremes, which carry a NaN on: one pass, nothing allocated."""
    if not tensor.numel():
        return True
    rows = max(1, _PIECE_NUMBERS // max(1, tensor[0].numel())) if tensor.dim() else 1
    for piece in torch.split(tensor, rows) if tensor.dim() else (tensor,):
        low, high = torch.aminmax(piece)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            return False
    return True


def _scales_finite(matrix: GGUFMatrix) -> bool:
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[matrix.type_name]]
    rows = max(1, _PIECE_NUMBERS // matrix.raw_NX.shape[1])
    for piece in torch.split(matrix.raw_NX, rows):
        blocks_NBX = piece.reshape(piece.shape[0], -1, size)
        if matrix.type_name == "MXFP4":
            if bool((blocks_NBX[:, :, 0] == _NO_EXPONENT).any()):
                return False
            continue
        for offset in _SCALE_OFFSETS[matrix.type_name]:  # a slice of both at once takes several times as long
            if bool(((blocks_NBX[:, :, offset + 1] & _EXPONENT) == _EXPONENT).any()):
                return False
    return True
