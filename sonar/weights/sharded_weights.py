"""One rank's part of a checkpoint: asks the source for a tensor and hands out the rows and columns the rank owns.

Sources give views of mapped files, so only what a rank owns is ever read. A quantized matrix is cut by whole rows, and
by columns where a block begins; where a cut falls within a block, the rank's columns are dequantized (exact, and as
large as dense ones). Wraps any `WeightSource`; called by the worker's loader.
"""

from __future__ import annotations

import logging

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from sonar.distributed.shard_map import Cut, ShardMap, Span
from sonar.models.base import WeightSource
from sonar.ops.reference_matrix import dequantize_rows
from sonar.ops.table import GGUFMatrix, Matrix, PlainMatrix

_logger = logging.getLogger(__name__)

# Rows dequantized at once where a cut falls within a block: bounds the scratch.
_PIECE_ROWS = 256


class ShardedWeights:
    """A `WeightSource` of one rank's tensors; shapes asked for are the rank's.

    Args:
        source: of the whole model.
    """

    def __init__(self, source: WeightSource, shard: ShardMap) -> None:
        self._source = source
        self._shard = shard
        self._has_warned = False

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return self._source.has(name)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See `WeightSource.tensor`."""
        cut = self._shard.cut(name)
        whole = self._source.tensor(name, _whole_shape(name, cut, shape), dtype)
        if cut.is_zero:
            return torch.zeros_like(whole)
        return whole if cut.rows is None else torch.cat([whole[span.start : span.stop] for span in cut.rows])

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.matrix`."""
        cut = self._shard.cut(name)
        num_rows, num_columns = _whole_shape(name, cut, shape)
        matrix = self._source.matrix(name, (num_rows, num_columns))
        if cut.rows is not None:
            matrix = _take_rows(matrix, cut.rows)
        if cut.columns is not None and cut.columns.size < num_columns:
            matrix = self._take_columns(name, matrix, cut.columns)
        assert matrix.shape == shape, f"{name}: {matrix.shape} of the rank, {shape} asked for"
        return matrix

    def unread(self) -> list[str]:
        """Tensors of the checkpoint that nothing asked for, without those that are other ranks' to ask for."""
        return [name for name in self._source.unread() if not self._shard.may_be_others(name)]

    def sizes(self) -> dict[str, int]:
        """Bytes of each whole tensor as stored."""
        return self._source.sizes()

    def _take_columns(self, name: str, matrix: Matrix, span: Span) -> Matrix:
        if isinstance(matrix, PlainMatrix):
            return PlainMatrix(matrix.weight_NK[:, span.start : span.stop].contiguous())
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[matrix.type_name]]
        if span.start % numbers == 0 and span.stop % numbers == 0:
            raw_NX = matrix.raw_NX[:, span.start // numbers * size : span.stop // numbers * size].contiguous()
            return GGUFMatrix(raw_NX, matrix.type_name, span.size)
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "%s: columns %d to %d cut through blocks of %d (%s); this rank holds such tensors dequantized",
                name, span.start, span.stop - 1, numbers, matrix.type_name,
            )  # fmt: skip
        return PlainMatrix(_dequantized_columns(matrix, span))


def _whole_shape(name: str, cut: Cut, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in the checkpoint of a tensor of which the rank has `shape`."""
    if cut.rows is not None:
        owned = sum(span.size for span in cut.rows)
        assert owned == shape[0], f"{name}: {owned} rows owned, {shape[0]} asked for"
        return (cut.whole, *shape[1:])
    if cut.columns is not None:
        assert cut.columns.size == shape[1], f"{name}: {cut.columns.size} columns owned, {shape[1]} asked for"
        return (shape[0], cut.whole)
    return shape


def _take_rows(matrix: Matrix, spans: tuple[Span, ...]) -> Matrix:
    """Views of a single span, copies of several."""
    stored = matrix.weight_NK if isinstance(matrix, PlainMatrix) else matrix.raw_NX
    pieces = [stored[span.start : span.stop] for span in spans]
    rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if isinstance(matrix, PlainMatrix):
        return PlainMatrix(rows)
    return GGUFMatrix(rows, matrix.type_name, matrix.num_columns)


def _dequantized_columns(matrix: GGUFMatrix, span: Span) -> Tensor:
    """float32 (N, columns of the span), a few rows at a time."""
    num_rows = matrix.shape[0]
    pieces = [
        dequantize_rows(matrix, first, min(first + _PIECE_ROWS, num_rows))[:, span.start : span.stop].clone()
        for first in range(0, num_rows, _PIECE_ROWS)
    ]
    return torch.cat(pieces)
