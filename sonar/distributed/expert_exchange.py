"""Tokens to the ranks of their experts and back, by all-to-all of torch.distributed (`sonar.ops.table.ExpertParallel`).

Three all-to-alls a layer: how many rows go where, the rows, and the experts' products back. A token's products are then
added up at home in the order of its choices, so its bits do not depend on where experts lie. Tensor-parallel ranks hold
the same tokens: each sends a share of them, and all gather the sums. Knows neither routers nor matrices. Made by the
worker's `Ranks`, used by MoE layers; every rank of the stage makes the same calls, also with no token.

Legend: T tokens, J choices a token, D hidden, X experts, M rows for this rank's experts, S places of a rank, R ranks, N
rows that this rank sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sonar.distributed.expert_placement import ExpertPlacement, first_placement
from sonar.distributed.shard_map import split
from sonar.distributed.tensor_parallel import TensorParallelGroup, collective
from sonar.ops.table import DispatchedRows, WeightedSumFn


@dataclass
class ExchangeCounts:
    """All-to-alls that this rank took part in, and the bytes it sent to others in them."""

    exchanges: int = 0
    count_bytes: int = 0
    row_bytes: int = 0


class _Route(NamedTuple):
    """The way back of one dispatch.

    Attributes:
        sent, received: rows to and from each rank. slot_order_M: which arrived row each row of x_MD is.
        places_TJ: of the share's tokens, where each choice's row lies among those sent.
    """

    sent: list[int]
    received: list[int]
    slot_order_M: Tensor
    places_TJ: Tensor
    weights_TJ: Tensor
    num_tokens: int


class LayerExchange:
    """One layer's exchange (`ExpertExchange`).

    Attributes:
        placement: now; changes between steps alone. load_X: rows of each expert that this rank has sent since it was
            last looked at, on the device.
        tensors: the layer's weights, one row a place each; empty when they cannot move.
    """

    def __init__(self, ranks: ExpertRanks, placement: ExpertPlacement) -> None:
        self.load_X = torch.zeros(placement.num_experts, dtype=torch.int64, device=ranks.device)
        self.tensors: tuple[Tensor, ...] = ()
        self._ranks = ranks
        self.place(placement)

    @property
    def slots(self) -> Sequence[int]:
        """See `ExpertExchange.slots`."""
        return self.placement.of_rank(self._ranks.rank)

    def place(self, placement: ExpertPlacement) -> None:
        """Sends rows by this placement from now on."""
        self.placement = placement
        places = placement.places()
        device = self._ranks.device
        self._copies_X = torch.tensor([len(found) for found in places], device=device)
        most = max(len(found) for found in places)
        self._places_XC = torch.tensor([found + found[:1] * (most - len(found)) for found in places], device=device)

    def adopt(self, tensors: Sequence[Tensor]) -> None:
        """After load, from a layer whose weights can move: each with one row a place, overwritten between steps."""
        size = self.placement.slots_per_rank
        assert all(tensor.shape[0] == size for tensor in tensors), f"not one row for each of {size} places"
        self.tensors = tuple(tensors)

    def dispatch(self, hidden_TD: Tensor, expert_ids_TJ: Tensor, weights_TJ: Tensor) -> DispatchedRows:
        """See `ExpertExchange.dispatch`."""
        share = self._ranks.share(hidden_TD.shape[0])
        num_choices = expert_ids_TJ.shape[1]
        expert_N = expert_ids_TJ[share].reshape(-1)
        self.load_X += torch.bincount(expert_N, minlength=self.placement.num_experts)
        place_N = self._choose_copies(expert_N, num_choices)
        order_N = torch.argsort(place_N, stable=True)
        x_ND = hidden_TD[share].index_select(0, order_N // num_choices)
        counts_RS = torch.bincount(place_N, minlength=len(self.placement.experts)).view(self._ranks.size, -1)
        arrived_RS = self._ranks.exchange_counts(counts_RS)
        sent, received = counts_RS.sum(1).tolist(), arrived_RS.sum(1).tolist()
        arrived_MD = self._ranks.exchange_rows(x_ND, sent, received)
        slot_M = torch.arange(arrived_RS.shape[1], device=place_N.device).repeat(self._ranks.size)
        slot_order_M = torch.argsort(slot_M.repeat_interleave(arrived_RS.view(-1)), stable=True)
        place_of_N = torch.empty_like(order_N)
        place_of_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
        route = _Route(
            sent, received, slot_order_M, place_of_N.view(-1, num_choices), weights_TJ[share], hidden_TD.shape[0]
        )
        offsets_X1 = torch.nn.functional.pad(arrived_RS.sum(0).cumsum(0), (1, 0)).to(torch.int32)
        return DispatchedRows(arrived_MD.index_select(0, slot_order_M), offsets_X1, partial(self._ranks.combine, route))

    def _choose_copies(self, expert_N: Tensor, num_choices: int) -> Tensor:
        """Of each row's expert one of its places; tokens take the copies in turn."""
        turn_N = torch.arange(expert_N.shape[0], device=expert_N.device) // num_choices + self._ranks.rank
        return self._places_XC[expert_N, turn_N % self._copies_X[expert_N]]


class ExpertRanks:
    """The experts of this stage's layers over its ranks (`ExpertParallel`).

    Args:
        group: the ranks, in order. tensor: those among them that hold the same tokens; None for this one alone.
        weighted_sum: of the backend, as a layer with all experts uses it.

    Attributes:
        counts: what was sent. layers: exchanges made, by layer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tensor: TensorParallelGroup | None,
        weighted_sum: WeightedSumFn,
        device: torch.device,
        num_redundant: int = 0,
    ) -> None:
        self.counts = ExchangeCounts()
        self.layers: dict[int, LayerExchange] = {}
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device
        self._tensor = tensor
        self._weighted_sum = weighted_sum
        self._num_redundant = num_redundant

    def exchange(self, layer: int, num_experts: int) -> LayerExchange:
        """See `ExpertParallel.exchange`."""
        placement = first_placement(num_experts, self.size, self._num_redundant)
        made = self.layers[layer] = LayerExchange(self, placement)
        return made

    def share(self, num_tokens: int) -> slice:
        """The tokens that this rank sends, of those that its tensor-parallel group holds."""
        if self._tensor is None:
            return slice(0, num_tokens)
        return slice(*split(num_tokens, self._tensor.size, self._tensor.rank))

    @collective
    def exchange_counts(self, counts_RS: Tensor) -> Tensor:
        """Rows that each rank sends for each place of this one, from the rows that this one sends."""
        self.counts.exchanges += 1
        self.counts.count_bytes += counts_RS[0].numel() * counts_RS.element_size() * (self.size - 1)
        arrived_RS = torch.empty_like(counts_RS)
        dist.all_to_all_single(arrived_RS, counts_RS, group=self.group)
        return arrived_RS

    @collective
    def exchange_rows(self, x_ND: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The rows that the others send, in the order of the ranks."""
        self.counts.exchanges += 1
        self.counts.row_bytes += (sum(sent) - sent[self.rank]) * x_ND.shape[1] * x_ND.element_size()
        arrived_MD = x_ND.new_empty((sum(received), x_ND.shape[1]))
        dist.all_to_all_single(arrived_MD, x_ND.contiguous(), received, sent, group=self.group)
        return arrived_MD

    def combine(self, route: _Route, y_MD: Tensor) -> Tensor:
        """Sends the experts' products home and adds up those of this rank's tokens, (T, D)."""
        back_MD = torch.empty_like(y_MD)
        back_MD[route.slot_order_M] = y_MD
        home_ND = self.exchange_rows(back_MD, route.received, route.sent)
        sum_TD = self._weighted_sum(home_ND, route.places_TJ, route.weights_TJ)
        return sum_TD if self._tensor is None else self._tensor.gather_rows(sum_TD, route.num_tokens)
