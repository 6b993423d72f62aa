"""Linear layers: one or several named matrices computed as one. Called by attention, mlp and the models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sonar.ops.table import LinearFn, OpTable

if TYPE_CHECKING:
    from sonar.models.base import WeightSource


class Part(NamedTuple):
    """One named matrix of a stack. name: without `.weight` or `.bias`. out_features: N."""

    name: str
    out_features: int


def load_linear(
    weights: WeightSource, ops: OpTable, parts: Sequence[Part], in_features: int, *, bias: bool = False
) -> LinearFn:
    """Stacks the parts' matrices along their outputs into one layer x_TK -> y_TN, N the sum over the parts.

    Args:
        bias: whether every part has one.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    matrices = [weights.matrix(f"{name}.weight", (out_features, in_features)) for name, out_features in parts]
    if not bias:
        return ops.linear(matrices, None)
    return ops.linear(
        matrices, torch.cat([weights.tensor(f"{part.name}.bias", (part.out_features,)) for part in parts])
    )


def load_summed_linear(
    weights: WeightSource, ops: OpTable, part: Part, in_features: int, *, bias: bool = False
) -> LinearFn:
    """A layer whose inputs are spread over tensor-parallel ranks: each multiplies its columns, the sum is the output.

    Args:
        in_features: of this rank. bias: whether it has one; the source gives zeros on all ranks but one.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    linear, parallel = load_linear(weights, ops, [part], in_features, bias=bias), ops.parallel
    if parallel is None:
        return linear
    add_up = parallel.sum

    def summed(x_TK: Tensor) -> Tensor:
        return add_up(linear(x_TK))

    return summed
