"""The mixture of experts of a sparse layer: choose, send rows to their experts, compute, bring back and add up.

Where experts lie on several ranks, `OpTable.expert_parallel` is the way between; here is that of one rank that holds
all. Among tensor-parallel ranks each expert's features are split, and so are the shared expert's: one sum has both.
Called by the models. Legend: as in `sonar.ops.table`.

Weight names, below the layer's `mlp.` (X experts, F of one expert, S shared features):
    gate.weight (X, D), gate.bias (X), gate.e_score_correction_bias (X) by traits
    experts.<i>.{gate,up}_proj.weight (F, D), experts.<i>.down_proj.weight (D, F), and biases by traits
    <shared>.{gate,up}_proj.weight (S, D), <shared>.down_proj.weight (D, S), shared_expert_gate.weight (1, D)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sonar.config import MoeConfig
from sonar.layers.linear import Part, load_linear
from sonar.layers.mlp import GatedMlp
from sonar.layers.norms import RmsNorm
from sonar.ops.reference_experts import sigmoid
from sonar.ops.table import (
    Activation,
    DispatchedRows,
    ExpertActivation,
    ExpertExchange,
    ExpertsFn,
    FusedOps,
    LinearFn,
    OpTable,
    RoutingSpec,
    Scoring,
)

if TYPE_CHECKING:
    from sonar.models.base import WeightSource


@dataclass(frozen=True)
class MoeTraits:
    """In what a family's experts depart from mixtral's.

    Attributes:
        router_bias: of the router's logits. correction_bias: of the choice alone. expert_bias: of the experts' linears.
        shared_name: of the shared expert below `mlp.`, where the configuration has one. shared_gate: its output is
            multiplied by sigmoid(shared_expert_gate(x)).
    """

    router_bias: bool = False
    correction_bias: bool = False
    expert_bias: bool = False
    shared_name: str = "shared_experts"
    shared_gate: bool = False


class LocalExchange:
    """An `ExpertExchange` of one rank that holds every expert."""

    def __init__(self, ops: OpTable, num_experts: int) -> None:
        self.slots: Sequence[int] = range(num_experts)
        self._sort_by_expert = ops.sort_by_expert
        self._weighted_sum = ops.weighted_sum

    def dispatch(self, hidden_TD: Tensor, expert_ids_TJ: Tensor, weights_TJ: Tensor) -> DispatchedRows:
        """See `ExpertExchange.dispatch`."""
        order = self._sort_by_expert(expert_ids_TJ, len(self.slots))
        weighted_sum = self._weighted_sum

        def combine(y_MD: Tensor) -> Tensor:
            return weighted_sum(y_MD, order.places_TJ, weights_TJ)

        return DispatchedRows(hidden_TD.index_select(0, order.tokens_M), order.offsets_X1, combine)


class SharedExpert:
    """The MLP that every token goes through, with or without a gate. Of tensor-parallel ranks a part of the sum."""

    def __init__(self, mlp: GatedMlp, gate: LinearFn | None) -> None:
        self._mlp = mlp
        self._gate = gate

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Returns a new (T, D) tensor."""
        out_TD = self._mlp(x_TD)
        return out_TD if self._gate is None else out_TD.mul_(sigmoid(self._gate(x_TD)))


class MoeMlp:
    """A sparse layer's MLP.

    Args:
        router: x_TD -> logits_TX. bias_X: of the choice.
    """

    def __init__(
        self,
        ops: OpTable,
        spec: RoutingSpec,
        *,
        router: LinearFn,
        bias_X: Tensor | None,
        exchange: ExpertExchange,
        experts: ExpertsFn,
        shared: SharedExpert | None,
    ) -> None:
        self._spec = spec
        self._router = router
        self._bias_X = bias_X
        self._exchange = exchange
        self._experts = experts
        self._shared = shared
        self._route = ops.route
        self._parallel = ops.parallel
        self._is_spread = ops.expert_parallel is not None

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Returns a new (T, D) tensor."""
        ids_TJ, weights_TJ = self._route(self._router(x_TD), self._bias_X, self._spec)
        rows = self._exchange.dispatch(x_TD, ids_TJ, weights_TJ)
        out_TD = rows.combine(self._experts(rows.x_MD, rows.offsets_X1))
        shared_TD = None if self._shared is None else self._shared(x_TD)
        if self._parallel is None:
            return out_TD if shared_TD is None else out_TD.add_(shared_TD)
        if self._is_spread:  # whole experts, each on one rank: nothing of theirs is left to be added
            return out_TD if shared_TD is None else out_TD.add_(self._parallel.sum(shared_TD))
        return self._parallel.sum(out_TD if shared_TD is None else out_TD.add_(shared_TD))

    def add_fused(self, residual_TD: Tensor, norm: RmsNorm, fused: FusedOps) -> None:
        """residual += moe(norm(residual)), in place; there is nothing to fuse."""
        residual_TD.add_(self(norm(residual_TD)))


def load_moe(
    weights: WeightSource,
    ops: OpTable,
    layer: int,
    hidden_size: int,
    moe: MoeConfig,
    activation: ExpertActivation,
    traits: MoeTraits,
) -> MoeMlp:
    """Loads a sparse layer's MLP: of the experts, those that this rank holds.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    prefix = f"model.layers.{layer}.mlp."
    exchange: ExpertExchange = LocalExchange(ops, moe.num_experts)
    if ops.expert_parallel is not None:
        exchange = ops.expert_parallel.exchange(layer, moe.num_experts)
    bias_X = None
    if traits.correction_bias:
        bias_X = weights.tensor(f"{prefix}gate.e_score_correction_bias", (moe.num_experts,), torch.float32)
    spec = RoutingSpec(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        scoring=Scoring(moe.scoring),
        renormalize=moe.renormalize,
        scale=moe.scale,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        group_best=moe.group_best,
    )
    router = load_linear(weights, ops, [Part(f"{prefix}gate", moe.num_experts)], hidden_size, bias=traits.router_bias)
    experts = _load_experts(weights, ops, f"{prefix}experts.", exchange.slots, hidden_size, moe, activation, traits)
    shared = None
    if moe.shared_intermediate_size:
        assert isinstance(activation, Activation), f"a shared expert with {activation}"
        shared = _load_shared(weights, ops, prefix, hidden_size, moe, activation, traits)
    return MoeMlp(ops, spec, router=router, bias_X=bias_X, exchange=exchange, experts=experts, shared=shared)


def _load_experts(
    weights: WeightSource,
    ops: OpTable,
    prefix: str,
    slots: Sequence[int],
    hidden: int,
    moe: MoeConfig,
    activation: ExpertActivation,
    traits: MoeTraits,
) -> ExpertsFn:
    inner = moe.intermediate_size
    gate_up = [
        [weights.matrix(f"{prefix}{i}.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up")] for i in slots
    ]
    down = [weights.matrix(f"{prefix}{i}.down_proj.weight", (hidden, inner)) for i in slots]
    if not traits.expert_bias:
        return ops.experts(gate_up, down, activation)
    gate_up_bias = [
        torch.cat([weights.tensor(f"{prefix}{i}.{part}_proj.bias", (inner,)) for part in ("gate", "up")]) for i in slots
    ]
    down_bias = [weights.tensor(f"{prefix}{i}.down_proj.bias", (hidden,)) for i in slots]
    return ops.experts(gate_up, down, activation, torch.stack(gate_up_bias), torch.stack(down_bias))


def _load_shared(
    weights: WeightSource,
    ops: OpTable,
    prefix: str,
    hidden: int,
    moe: MoeConfig,
    activation: Activation,
    traits: MoeTraits,
) -> SharedExpert:
    name, inner = f"{prefix}{traits.shared_name}.", moe.shared_intermediate_size
    gate_up = load_linear(weights, ops, [Part(f"{name}gate_proj", inner), Part(f"{name}up_proj", inner)], hidden)
    down = load_linear(weights, ops, [Part(f"{name}down_proj", hidden)], inner)
    gate = load_linear(weights, ops, [Part(f"{prefix}shared_expert_gate", 1)], hidden) if traits.shared_gate else None
    return SharedExpert(GatedMlp(ops, gate_up, down, activation), gate)
