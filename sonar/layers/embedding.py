"""The tables over the vocabulary: embedding at the bottom, head at the top. Called by the models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonar.ops.table import EmbeddingFn, LinearFn, OpTable

if TYPE_CHECKING:
    from sonar.models.base import WeightSource


class VocabTables:
    """Embedding and head of a model.

    A tied head is given the very `Matrix` object of the embedding, so that a backend that must unpack it can keep one
    copy.

    Args:
        embedding_name, head_name: with `.weight`. tied: the head is the embedding; head_name is not asked for.

    Attributes:
        embed: token ids -> x_TD. head: hidden_SD -> logits_SV in the compute dtype.

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
    ) -> None:
        shape = (vocab_size, hidden_size)
        table = weights.matrix(embedding_name, shape)
        self.embed: EmbeddingFn = ops.embedding(table)
        self.head: LinearFn = ops.linear([table if tied else weights.matrix(head_name, shape)], None)
