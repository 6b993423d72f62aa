"""Evens out the experts' load between steps: measures, plans alike on every rank, and sends weights where they go.

One layer at a time, each after so many steps, at the same step on every rank: nobody has to be told, and no step waits
for more than one layer's weights. All ranks know the loads of all and so find the same plan. Called by the model runner
before a step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sonar.distributed.expert_exchange import ExpertRanks, LayerExchange
from sonar.distributed.expert_placement import ExpertPlacement, Move, imbalance, plan_moves, rebalance
from sonar.distributed.tensor_parallel import collective

# Where experts do not move, their load is measured so often all the same.
MEASURE_STEPS = 256


class ExpertBalance:
    """Owns the measured figures.

    Args:
        rebalance_steps: steps between two looks at a layer; 0 = look every `MEASURE_STEPS`, and move nothing.

    Attributes:
        num_moved: places that got another expert.
    """

    def __init__(self, ranks: ExpertRanks, rebalance_steps: int) -> None:
        self.num_moved = 0
        self._ranks = ranks
        self._can_move = rebalance_steps > 0
        self._period = max(rebalance_steps or MEASURE_STEPS, len(ranks.layers))
        self._imbalance: dict[int, float] = {}

    @property
    def worst_imbalance(self) -> float:
        """Rows of the busiest rank by the ranks' mean, in the layer where that is largest; 0 before it is known."""
        return max(list(self._imbalance.values()), default=0.0)

    def before_step(self, step: int) -> None:
        """Looks at the layer whose turn it is, if it is one's."""
        turn = step % self._period
        if step < self._period or turn >= len(self._ranks.layers):
            return
        index = sorted(self._ranks.layers)[turn]
        layer = self._ranks.layers[index]
        loads = self._measure(layer)
        self._imbalance[index] = imbalance(layer.placement.rank_loads(loads))
        if self._can_move and layer.tensors:
            new = rebalance(layer.placement, loads)
            if new is not layer.placement:
                self._move(layer, new)
                self._imbalance[index] = imbalance(new.rank_loads(loads))

    @collective
    def _measure(self, layer: LayerExchange) -> list[float]:
        """Rows of each expert since the last look, over all ranks."""
        load_X = layer.load_X.clone()
        layer.load_X.zero_()
        dist.all_reduce(load_X, group=self._ranks.group)
        return [float(load) for load in load_X.tolist()]

    def _move(self, layer: LayerExchange, new: ExpertPlacement) -> None:
        moves = plan_moves(layer.placement, new)
        for tensor in layer.tensors:
            self._send(tensor, moves, new.slots_per_rank)
        layer.place(new)
        self.num_moved += len(moves)

    @collective
    def _send(self, tensor: Tensor, moves: list[Move], size: int) -> None:
        """Overwrites the places of one tensor. Ranks agree on the order: that of the moves."""
        rank, count = self._ranks.rank, self._ranks.size
        leaving = [[m.source % size for m in moves if m.source // size == rank and m.target // size == r]
                   for r in range(count)]  # fmt: skip
        coming = [[m.target % size for m in moves if m.target // size == rank and m.source // size == r]
                  for r in range(count)]  # fmt: skip
        out_N = tensor.new_tensor([slot for slots in leaving for slot in slots], dtype=torch.int64)
        in_N = tensor.new_tensor([slot for slots in coming for slot in slots], dtype=torch.int64)
        flat = tensor.view(torch.uint8).view(tensor.shape[0], -1)
        sent = flat.index_select(0, out_N)
        arrived = flat.new_empty((in_N.shape[0], flat.shape[1]))
        dist.all_to_all_single(
            arrived, sent, [len(s) for s in coming], [len(s) for s in leaving], group=self._ranks.group
        )
        flat[in_N] = arrived
