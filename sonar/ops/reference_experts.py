"""Mixtures of experts in plain torch: choice, order, the experts' MLPs, weighted sum.

Experts are computed one after the other over their rows, which reads the offsets on the host. Built into the reference
table by `sonar.ops.reference`; backends whose products are faster give theirs to `PerExpert`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sonar.ops.table import (
    Activation,
    ClampedSwiglu,
    ExpertActivation,
    ExpertOrder,
    ExpertsFn,
    GatedActivationFn,
    LinearFactory,
    LinearFn,
    Matrix,
    RoutingSpec,
    Scoring,
)


def route(logits_TX: Tensor, bias_X: Tensor | None, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    """See `sonar.ops.table.RouteFn`."""
    logits_TX = logits_TX.to(torch.float32)
    scores_TX = _scores(logits_TX, spec.scoring)
    choice_TX = scores_TX if bias_X is None else scores_TX + bias_X
    if spec.top_groups < spec.num_groups:
        choice_TX = choice_TX.masked_fill(~_in_best_groups(choice_TX, spec), float("-inf"))
    ids_TJ = _first_of_sorted(choice_TX, spec.top_k)
    weights_TJ = scores_TX.gather(1, ids_TJ)
    if spec.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights_TJ = weights_TJ.softmax(dim=-1)
    if spec.renormalize:
        weights_TJ = weights_TJ / _ordered_sum(weights_TJ).add_(1e-20)
    return ids_TJ, weights_TJ if spec.scale == 1.0 else weights_TJ * spec.scale


def _scores(logits_TX: Tensor, scoring: Scoring) -> Tensor:
    match scoring:
        case Scoring.SOFTMAX:
            return logits_TX.softmax(dim=-1)
        case Scoring.SIGMOID:
            return sigmoid(logits_TX)
        case Scoring.SOFTMAX_OF_CHOSEN:
            return logits_TX


def sigmoid(x: Tensor) -> Tensor:
    """In float64, rounded: torch's own float32 differs in the last bit by where in the tensor a number lies."""
    return x.to(torch.float64).sigmoid().to(x.dtype)


def _in_best_groups(choice_TX: Tensor, spec: RoutingSpec) -> Tensor:
    """Whether each expert lies in one of the best groups."""
    by_group = choice_TX.view(choice_TX.shape[0], spec.num_groups, spec.num_experts // spec.num_groups)
    best = by_group.sort(dim=-1, descending=True).values[..., : spec.group_best]
    groups_TK = _first_of_sorted(_ordered_sum(best).squeeze(-1), spec.top_groups)
    chosen_TG = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=choice_TX.device)
    return chosen_TG.scatter_(1, groups_TK, True).repeat_interleave(by_group.shape[2], dim=1)


def _first_of_sorted(values: Tensor, count: int) -> Tensor:
    """Indices of the largest along the last dimension, falling, equal ones by rising index. (topk promises no order
    among equals.)"""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _ordered_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept as 1, from first to last: the same whatever the shape."""
    total = x[..., :1].clone()
    for place in range(1, x.shape[-1]):
        total += x[..., place : place + 1]
    return total


def sort_by_expert(expert_ids_TJ: Tensor, num_experts: int) -> ExpertOrder:
    """See `sonar.ops.table.SortByExpertFn`."""
    ids_M, order_M = expert_ids_TJ.flatten().sort(stable=True)
    places_M = torch.empty_like(order_M)
    places_M[order_M] = torch.arange(order_M.shape[0], device=order_M.device)
    bounds_X1 = torch.arange(num_experts + 1, dtype=ids_M.dtype, device=ids_M.device)
    offsets_X1 = torch.searchsorted(ids_M, bounds_X1, out_int32=True)
    return ExpertOrder(order_M // expert_ids_TJ.shape[1], offsets_X1, places_M.view(expert_ids_TJ.shape))


def weighted_sum(y_MD: Tensor, places_TJ: Tensor, weights_TJ: Tensor) -> Tensor:
    """See `sonar.ops.table.WeightedSumFn`."""
    total_TD = torch.zeros((places_TJ.shape[0], y_MD.shape[1]), dtype=torch.float32, device=y_MD.device)
    for places_T, weights_T in zip(places_TJ.unbind(1), weights_TJ.unbind(1), strict=True):
        # In two steps: a fused multiply-add rounds otherwise, and torch fuses by where in the tensor a number lies.
        total_TD += y_MD.index_select(0, places_T).to(torch.float32).mul_(weights_T.unsqueeze(1))
    return total_TD.to(y_MD.dtype)


def clamped_swiglu(gate_up_MF: Tensor, unit: ClampedSwiglu) -> Tensor:
    """See `sonar.ops.table.ClampedSwiglu`: (M, 2 F) -> (M, F)."""
    gate_MF, up_MF = gate_up_MF.chunk(2, dim=-1)
    gate_MF = gate_MF.clamp(max=unit.limit)
    up_MF = up_MF.clamp(-unit.limit, unit.limit)
    return sigmoid(gate_MF * unit.alpha).mul_(gate_MF).mul_(up_MF.add_(1))


class PerExpert:
    """An experts factory out of a linear factory: each expert's rows through its own linears, one expert at a time.

    Row-invariant if the linears and the activation are.
    """

    def __init__(self, linear: LinearFactory, gated_activation: GatedActivationFn) -> None:
        self._linear = linear
        self._gated_activation = gated_activation

    def experts(
        self,
        gate_up: Sequence[Sequence[Matrix]],
        down: Sequence[Matrix],
        activation: ExpertActivation,
        gate_up_bias_XF: Tensor | None = None,
        down_bias_XD: Tensor | None = None,
    ) -> ExpertsFn:
        """See `sonar.ops.table.ExpertsFactory`."""
        first = [self._linear(parts, _row(gate_up_bias_XF, x)) for x, parts in enumerate(gate_up)]
        second = [self._linear([matrix], _row(down_bias_XD, x)) for x, matrix in enumerate(down)]
        unit = self._unit(activation)

        def experts(x_MD: Tensor, offsets_X1: Tensor) -> Tensor:
            offsets = offsets_X1.tolist()
            out_MD = torch.empty_like(x_MD)
            for expert, (start, stop) in enumerate(pairwise(offsets)):
                if start < stop:
                    out_MD[start:stop] = second[expert](unit(first[expert](x_MD[start:stop])))
            return out_MD

        return experts

    def _unit(self, activation: ExpertActivation) -> LinearFn:
        if isinstance(activation, Activation):
            gated, kind = self._gated_activation, activation
            return lambda gate_up_MF: gated(gate_up_MF, kind)
        clamped = activation
        return lambda gate_up_MF: clamped_swiglu(gate_up_MF, clamped)


def _row(bias_XN: Tensor | None, expert: int) -> Tensor | None:
    return None if bias_XN is None else bias_XN[expert]


def head_linear(dense: Callable[[Sequence[Matrix]], Tensor], matrices: Sequence[Matrix]) -> LinearFn:
    """A head linear by batched products. dense: the matrices stacked along N, in the compute dtype, on the device."""
    weight_HKN = dense(matrices).view(len(matrices), *matrices[0].shape).transpose(1, 2)

    def linear(x_THK: Tensor) -> Tensor:
        return torch.bmm(x_THK.transpose(0, 1), weight_HKN).transpose(0, 1).contiguous()

    return linear
