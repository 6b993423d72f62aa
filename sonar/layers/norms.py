"""Norms over the hidden dimension. Called by the models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sonar.ops.table import OpTable

if TYPE_CHECKING:
    from sonar.models.base import WeightSource


def load_norm_weight(weights: WeightSource, name: str, size: int, offset: float = 0.0) -> Tensor:
    """A norm's weight plus offset (gemma stores w and multiplies by 1 + w); the sum is rounded once, from float32."""
    weight = weights.tensor(name, (size,))
    return weight if offset == 0.0 else (weight.to(torch.float32) + offset).to(weight.dtype)


class RmsNorm:
    """RMSNorm with an optional residual add before it.

    Args:
        name: with `.weight`. offset: added to the stored weight.
    """

    def __init__(
        self, weights: WeightSource, ops: OpTable, name: str, size: int, eps: float, offset: float = 0.0
    ) -> None:
        self.weight_D = load_norm_weight(weights, name, size, offset)
        self.eps = eps
        self._rms_norm = ops.rms_norm
        self._add_rms_norm = ops.add_rms_norm

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Normalizes x."""
        return self._rms_norm(x_TD, self.weight_D, self.eps)

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """Adds x to the residual in place and returns the residual normalized."""
        return self._add_rms_norm(x_TD, residual_TD, self.weight_D, self.eps)


class LayerNorm:
    """LayerNorm with weight and bias. name: without `.weight` or `.bias`."""

    def __init__(self, weights: WeightSource, ops: OpTable, name: str, size: int, eps: float) -> None:
        self.weight_D = weights.tensor(f"{name}.weight", (size,))
        self.bias_D = weights.tensor(f"{name}.bias", (size,))
        self.eps = eps
        self._layer_norm = ops.layer_norm

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Normalizes x."""
        return self._layer_norm(x_TD, self.weight_D, self.bias_D, self.eps)
