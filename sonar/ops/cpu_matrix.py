"""Linear layers and embeddings on the compiled kernels, from dense and GGUF-quantized matrices.

Weights are repacked once, at load, for the register tile, in the bits they are stored in; the types the kernels do not
know are widened to float32 first. Built into its table by `sonar.ops.cpu`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from sonar.errors import ModelError
from sonar.ops import _cpu
from sonar.ops.cpu_arena import Arena
from sonar.ops.cpu_rows import ACTIVATION_KINDS, as_float32
from sonar.ops.reference_matrix import dequantize_rows
from sonar.ops.table import Activation, EmbeddingFn, GGUFMatrix, HeadLinearFn, Matrix, PlainMatrix

_PLAIN_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
_MAX_PARTS = 8  # of one plan in csrc/cpu/linear.cpp


class MatrixOps:
    """The linear and embedding factories of one compute dtype and activation mode. Owns the arena of packed weights."""

    def __init__(self, dtype: torch.dtype, *, is_int8: bool) -> None:
        self._dtype = dtype
        self._is_int8 = is_int8
        self._arena = Arena()

    def linear(self, parts: Sequence[Matrix], bias_N: Tensor | None) -> CpuLinear:
        """See `sonar.ops.table.LinearFactory`.

        Raises:
            ModelError: a quantization that cannot be read, or rows of a length that does not fit it.
        """
        assert 1 <= len(parts) <= _MAX_PARTS, f"{len(parts)} parts"
        num_out, num_in = sum(part.shape[0] for part in parts), parts[0].shape[1]
        bias = None if bias_N is None else as_float32(bias_N).clone()
        arguments, kept, first = [], [bias], 0
        for part in parts:
            kind, rows_NX = _stored_rows(part)
            packed = self._pack(kind, rows_NX, num_in)
            bias_address = 0 if bias is None else bias.data_ptr() + 4 * first
            is_int8 = self._is_int8 and kind not in _PLAIN_TYPES.values()
            arguments += [int(kind), int(is_int8), part.shape[0], packed.data_ptr(), bias_address]
            kept.append(packed)
            first += part.shape[0]
        return CpuLinear(_cpu.linear_plan(num_in, *arguments), num_out, self._dtype, tuple(kept))

    def head_linear(self, matrices: Sequence[Matrix]) -> HeadLinearFn:
        """See `sonar.ops.table.HeadLinearFactory`. Raises as `linear`."""
        heads = [self.linear([matrix], None) for matrix in matrices]
        num_out, dtype = matrices[0].shape[0], self._dtype

        def linear(x_THK: Tensor) -> Tensor:
            x = x_THK if x_THK.dtype is torch.float32 else x_THK.to(torch.float32)
            y_THN = torch.empty((x.shape[0], len(heads), num_out))
            for head, by_head in enumerate(heads):
                by_head.write(x[:, head], y_THN[:, head])
            return y_THN if dtype is torch.float32 else y_THN.to(dtype)

        return linear

    def embedding(self, table: Matrix) -> EmbeddingFn:
        """See `sonar.ops.table.EmbeddingFactory`. Rows are read where they are stored. Raises as `linear`."""
        kind, rows_VX = _stored_rows(table)
        num_rows, size, dtype = *table.shape, self._dtype
        row_bytes = rows_VX.stride(0) * rows_VX.element_size()

        def embedding(token_ids_T: Tensor) -> Tensor:
            ids = token_ids_T.contiguous()
            out = torch.empty((ids.shape[0], size))
            _cpu.embedding(
                kind, rows_VX.data_ptr(), row_bytes, num_rows, size, ids.data_ptr(), ids.shape[0], out.data_ptr()
            )
            return out if dtype is torch.float32 else out.to(dtype)

        return embedding

    def _pack(self, kind: GGMLQuantizationType, rows_NX: Tensor, num_columns: int) -> Tensor:
        num_rows = rows_NX.shape[0]
        packed = self._arena.take(_cpu.packed_bytes(kind, num_rows, num_columns))
        row_bytes = rows_NX.stride(0) * rows_NX.element_size()
        _cpu.pack(kind, rows_NX.data_ptr(), row_bytes, num_rows, num_columns, packed.data_ptr())
        return packed


class CpuLinear:
    """A `LinearFn`, and the fused forms of `FusedOps`: bits are those of the single ops.

    Owns the plan, and with it the weights and the bias, which the plan only points to.
    """

    def __init__(
        self, plan: _cpu.LinearPlan, num_out: int, dtype: torch.dtype, kept: tuple[Tensor | None, ...]
    ) -> None:
        self._plan = plan
        self._num_out = num_out
        self._is_float32 = dtype is torch.float32
        self._dtype = dtype
        self._kept = kept

    @property
    def plan(self) -> _cpu.LinearPlan:
        """Valid as long as this linear lives."""
        return self._plan

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._into_new(as_float32(x_TK), self._num_out, 0, 0.0, -1)

    def norm(self, x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        """linear(rms_norm(x))."""
        weight = as_float32(weight_K)
        return self._into_new(as_float32(x_TK), self._num_out, weight.data_ptr(), eps, -1)

    def norm_gated(self, x_TK: Tensor, weight_K: Tensor, eps: float, activation: Activation) -> Tensor:
        """gated_activation(linear(rms_norm(x))), (T, N / 2)."""
        weight, kind = as_float32(weight_K), ACTIVATION_KINDS[activation]
        return self._into_new(as_float32(x_TK), self._num_out // 2, weight.data_ptr(), eps, kind)

    def add_to(self, x_TK: Tensor, residual_TN: Tensor) -> None:
        """residual += linear(x), in place."""
        if residual_TN.dtype is not torch.float32 or not residual_TN.is_contiguous():
            residual_TN.add_(self(x_TK))
            return
        x, num_out = as_float32(x_TK), self._num_out
        num_rows, num_in = x.shape
        _cpu.linear(self._plan, x.data_ptr(), num_in, num_rows, residual_TN.data_ptr(), num_out, 0, 0.0, -1, 1)

    def write(self, x_TK: Tensor, out_TN: Tensor) -> None:
        """out = linear(x); both float32, of any row stride."""
        x, y = (x_TK.data_ptr(), x_TK.stride(0)), (out_TN.data_ptr(), out_TN.stride(0))
        _cpu.linear(self._plan, *x, x_TK.shape[0], *y, 0, 0.0, -1, 0)

    def _into_new(self, x: Tensor, num_out: int, norm: int, eps: float, activation: int) -> Tensor:
        num_rows, num_in = x.shape
        y_TN = torch.empty((num_rows, num_out))
        _cpu.linear(self._plan, x.data_ptr(), num_in, num_rows, y_TN.data_ptr(), num_out, norm, eps, activation, 0)
        return y_TN if self._is_float32 else y_TN.to(self._dtype)


def _stored_rows(matrix: Matrix) -> tuple[GGMLQuantizationType, Tensor]:
    """A type the kernels know and rows in it, contiguous each, on the CPU: views where possible."""
    if isinstance(matrix, PlainMatrix):
        weight_NK = matrix.weight_NK.cpu()
        if weight_NK.dtype not in _PLAIN_TYPES:
            weight_NK = weight_NK.to(torch.float32)
        return _PLAIN_TYPES[weight_NK.dtype], weight_NK if weight_NK.stride(1) == 1 else weight_NK.contiguous()
    kind = GGMLQuantizationType.__members__.get(matrix.type_name)
    if kind is GGMLQuantizationType.MXFP4:  # four bits and a power of two: exact in bfloat16
        return GGMLQuantizationType.BF16, dequantize_rows(matrix, 0, matrix.shape[0]).to(torch.bfloat16)
    if kind is None or not _cpu.packed_bytes(kind, 1, 256):
        return GGMLQuantizationType.F32, dequantize_rows(matrix, 0, matrix.shape[0])
    _check_row(matrix, kind)
    return kind, matrix.raw_NX.cpu() if matrix.raw_NX.stride(1) == 1 else matrix.raw_NX.cpu().contiguous()


def _check_row(matrix: GGUFMatrix, kind: GGMLQuantizationType) -> None:
    """The kernels read as many bytes as the shape says: they must be there."""
    block_numbers, block_bytes = GGML_QUANT_SIZES[kind]
    found = matrix.raw_NX.shape[1] * matrix.raw_NX.element_size()
    if matrix.num_columns % block_numbers or found != matrix.num_columns // block_numbers * block_bytes:
        raise ModelError(
            f"a row of {matrix.num_columns} numbers in {kind.name} takes {block_bytes} bytes for each {block_numbers}, "
            f"not {found} in all: the file is corrupt",
            param="model",
        )
