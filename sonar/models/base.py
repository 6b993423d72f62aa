"""What a model is to the worker, and what it is made from.

A family is one file in this folder and one line in `registry.py`; its constructor takes (ModelConfig, WeightSource,
OpTable), asks the source for every tensor by its Hugging Face name, and keeps prepared layers. Called by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sonar.ops.table import AttentionMetadata, Matrix


@dataclass(frozen=True)
class ForwardBatch:
    """One step as a model sees it; all tensors on the model's device.

    Attributes:
        token_ids_T, positions_T: int64.
        kv_layers: per layer of this rank, its cache view (num_blocks, 2, G, Z, E).
        attention: per layer, the metadata of its cache group (layers of a group share the object).
        logits_rows_S: int64, token rows whose logits are wanted.
        hidden_TD: what the pipeline stage before this one returned; None in the first, which embeds.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    kv_layers: tuple[Tensor, ...]
    attention: tuple[AttentionMetadata, ...]
    logits_rows_S: Tensor
    hidden_TD: Tensor | None = None


class Model(Protocol):
    """A decoder on one rank, or the part of one that its `ModelConfig` gives to this rank."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Returns hidden_TD after the final norm, or for the next pipeline stage; writes the cache."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Returns float32 logits_SV; of tensor-parallel ranks, each the columns of its `OpTable.parallel.vocabulary`.
        On the last stage alone."""
        ...


class WeightSource(Protocol):
    """Where tensors come from: safetensors, GGUF, or random numbers. Names are always Hugging Face's."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A dense tensor (norm weight, bias) on the device, in the compute dtype or another.

        Raises:
            ModelError: it is missing, truncated or of another shape; the text names the tensor.
        """
        ...

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """A linear or embedding weight (N, K) as stored, for `OpTable.linear` or `.embedding`. Raises as `tensor`."""
        ...

    def unread(self) -> list[str]:
        """Tensors of the checkpoint that nothing asked for."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor as stored; empty when nothing is stored."""
        ...
