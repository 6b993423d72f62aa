"""Linear and embedding in plain torch, from dense and GGUF-quantized matrices.

A quantized matrix is dequantized once, at load, into the compute dtype: right everywhere, and as large as a dense
model. Built into the reference table by `sonar.ops.reference`.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sonar.errors import ModelError
from sonar.ops.table import EmbeddingFn, GGUFMatrix, LinearFn, Matrix, PlainMatrix

# Rows are dequantized in pieces of this many numbers, which bounds the float32 scratch of numpy at some tens of MB.
_PIECE_NUMBERS = 1 << 22


class MatrixOps:
    """The linear and embedding factories for one device and compute dtype.

    Owns a weak map from an embedding's stored tensor to its dense copy, which a head tied to it shares.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", to compare with a tensor's
        self._dtype = dtype
        self._tables: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def linear(self, parts: Sequence[Matrix], bias_N: Tensor | None) -> LinearFn:
        """See `sonar.ops.table.LinearFactory`. Raises `ModelError` as `dequantize_rows`."""
        weight_NK = self.dense(parts)
        if bias_N is not None:
            bias_N = bias_N.to(self._device, self._dtype)

        def linear(x_TK: Tensor) -> Tensor:
            return F.linear(x_TK, weight_NK, bias_N)

        return linear

    def dense(self, parts: Sequence[Matrix]) -> Tensor:
        """The parts stacked along N, in the compute dtype on the device; a stored tensor itself where it is that
        already. Raises as `linear`."""
        return self._dense(parts[0]) if len(parts) == 1 else self._stack(parts)

    def embedding(self, table: Matrix) -> EmbeddingFn:
        """See `sonar.ops.table.EmbeddingFactory`. Raises `ModelError` as `dequantize_rows`."""
        dtype = self._dtype
        if isinstance(table, PlainMatrix) and self._device.type == "cpu":
            table_VD = table.weight_NK  # read row by row as it is stored: a mapped file needs no copy
        else:
            table_VD = self._dense(table)
            self._tables[_stored(table)] = table_VD

        def embedding(token_ids_T: Tensor) -> Tensor:
            return table_VD.index_select(0, token_ids_T).to(dtype)

        return embedding

    def _dense(self, matrix: Matrix) -> Tensor:
        """(N, K) in the compute dtype on the device: the stored tensor itself if it is that already."""
        stored = _stored(matrix)
        if isinstance(matrix, PlainMatrix) and stored.dtype == self._dtype and stored.device == self._device:
            return stored
        return self._tables[stored] if stored in self._tables else self._stack([matrix])

    def _stack(self, parts: Sequence[Matrix]) -> Tensor:
        num_rows = [part.shape[0] for part in parts]
        out_NK = torch.empty(sum(num_rows), parts[0].shape[1], dtype=self._dtype, device=self._device)
        for part, rows in zip(parts, torch.split(out_NK, num_rows), strict=True):
            _write_dense(part, rows)
        return out_NK


def _stored(matrix: Matrix) -> Tensor:
    return matrix.weight_NK if isinstance(matrix, PlainMatrix) else matrix.raw_NX


def _write_dense(matrix: Matrix, out_NK: Tensor) -> None:
    """Writes the numbers of a matrix into out_NK, cast to its dtype and device."""
    if isinstance(matrix, PlainMatrix):
        out_NK.copy_(matrix.weight_NK)
        return
    step = max(1, _PIECE_NUMBERS // matrix.num_columns)
    for first in range(0, matrix.shape[0], step):
        out_NK[first : first + step].copy_(dequantize_rows(matrix, first, first + step))


def dequantize_rows(matrix: GGUFMatrix, first: int, last: int) -> Tensor:
    """Rows first to last - 1 as float32 on the CPU.

    Raises:
        ModelError: a type that cannot be read (lists those that can), or rows of a length that does not fit it.
    """
    kind = GGMLQuantizationType.__members__.get(matrix.type_name)
    if kind is None or not _is_readable(kind):
        known = ", ".join(known.name for known in GGMLQuantizationType if _is_readable(known))
        raise ModelError(f"quantization {matrix.type_name!r} is not supported; known are {known}", param="model")
    block_numbers, block_bytes = GGML_QUANT_SIZES[kind]
    raw = matrix.raw_NX[first:last].cpu().numpy()
    if raw.shape[1] * block_numbers != matrix.num_columns * block_bytes:
        raise ModelError(
            f"a row of {matrix.num_columns} numbers in {kind.name} takes {block_bytes} bytes for each {block_numbers}, "
            f"not {raw.shape[1]} in all: the file is corrupt",
            param="model",
        )
    return torch.from_numpy(quants.dequantize(np.ascontiguousarray(raw), kind).astype(np.float32, copy=False))


def _is_readable(kind: GGMLQuantizationType) -> bool:
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
