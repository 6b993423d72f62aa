"""The tables over the vocabulary: embedding at the bottom, head at the top. Called by the models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sonar.ops.table import EmbeddingFn, LinearFn, Matrix, OpTable, TensorParallel

if TYPE_CHECKING:
    from sonar.models.base import WeightSource


class VocabTables:
    """Embedding and head of a model.

    A tied head is given the very `Matrix` object of the embedding, so that a backend that must unpack it can keep one
    copy. Among tensor-parallel ranks each holds some rows of both.

    Args:
        embedding_name, head_name: with `.weight`. tied: the head is the embedding; head_name is not asked for.
        has_embedding, has_head: what this rank computes; false in stages of a pipeline.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """

    def __init__(
        self,
        weights: WeightSource,
        ops: OpTable,
        *,
        embedding_name: str,
        head_name: str,
        vocab_size: int,
        hidden_size: int,
        tied: bool,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        first, last = ops.parallel.vocabulary(vocab_size) if ops.parallel else (0, vocab_size)
        shape = (last - first, hidden_size)
        table: Matrix | None = None
        self._embed: EmbeddingFn | None = None
        self._head: LinearFn | None = None
        if has_embedding or (has_head and tied):
            table = weights.matrix(embedding_name, shape)
        if has_embedding and table is not None:
            embed = ops.embedding(table)
            self._embed = _shared_embedding(embed, ops.parallel, first, last) if ops.parallel else embed
        if has_head:
            self._head = ops.linear([table if tied and table is not None else weights.matrix(head_name, shape)], None)

    @property
    def embed(self) -> EmbeddingFn:
        """Token ids -> x_TD."""
        assert self._embed is not None, "this stage has no embedding"
        return self._embed

    @property
    def head(self) -> LinearFn:
        """hidden_SD -> logits in the compute dtype: of the whole vocabulary, or this rank's part of it."""
        assert self._head is not None, "this stage has no head"
        return self._head


def _shared_embedding(embed: EmbeddingFn, parallel: TensorParallel, first: int, last: int) -> EmbeddingFn:
    """Each rank looks up the tokens of its rows and leaves zeros for the others; the sum has all."""

    def embed_and_sum(token_ids_T: Tensor) -> Tensor:
        is_elsewhere_T = (token_ids_T < first) | (token_ids_T >= last)
        rows_T = (token_ids_T - first).masked_fill_(is_elsewhere_T, 0)
        return parallel.sum(embed(rows_T).masked_fill_(is_elsewhere_T.unsqueeze(1), 0))

    return embed_and_sum
