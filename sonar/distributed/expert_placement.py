"""Which expert each place of each rank holds, and where experts go to even out measured load. Pure and torch-free.

There are as many places on every rank, in all at least one for each expert; those beyond hold second copies of experts
that are in demand. Called by `expert_exchange` and `expert_balance`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A plan has to lighten the busiest rank by this share: less is not worth sending weights for.
_LEAST_GAIN = 0.05


@dataclass(frozen=True)
class ExpertPlacement:
    """Which expert lies where.

    Attributes:
        experts: by place; places rank * slots_per_rank and on are that rank's.
    """

    experts: tuple[int, ...]
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        assert len(self.experts) % self.num_ranks == 0, f"{len(self.experts)} places on {self.num_ranks} ranks"
        missing = set(range(self.num_experts)) - set(self.experts)
        assert not missing, f"experts {sorted(missing)} have no place"

    @property
    def slots_per_rank(self) -> int:
        """Places of a rank."""
        return len(self.experts) // self.num_ranks

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Experts of a rank's places, in order."""
        size = self.slots_per_rank
        return self.experts[rank * size : (rank + 1) * size]

    def places(self) -> list[list[int]]:
        """Of each expert, its places, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, expert in enumerate(self.experts):
            found[expert].append(place)
        return found

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """Rows that each rank gets when an expert's rows are shared out evenly among its places."""
        share = [load / len(places) for load, places in zip(loads, self.places(), strict=True)]
        return [sum(share[expert] for expert in self.of_rank(rank)) for rank in range(self.num_ranks)]


class Move(NamedTuple):
    """A place that gets another expert: from where, to where (places count over all ranks)."""

    source: int
    target: int


def first_placement(num_experts: int, num_ranks: int, num_redundant: int = 0) -> ExpertPlacement:
    """The placement before anything is measured. Places are made up to the same number on each rank."""
    return plan_placement([1.0] * num_experts, num_ranks, -(-(num_experts + num_redundant) // num_ranks))


def plan_placement(loads: Sequence[float], num_ranks: int, slots_per_rank: int) -> ExpertPlacement:
    """Places experts so that the busiest rank has little more to do than the others.

    Greedy twice: a spare place goes to the expert whose copies have most to do, and copies, heaviest first, to the rank
    that has least to do and still has room; ranks that hold the expert already come last.

    Args:
        loads: rows of each expert, of whatever period.
    """
    copies = _count_copies(loads, num_ranks * slots_per_rank)
    shares = [(loads[expert] / count, expert) for expert, count in enumerate(copies) for _ in range(count)]
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for share, expert in sorted(shares, key=lambda item: (-item[0], item[1])):
        open_ranks = [rank for rank in range(num_ranks) if len(held[rank]) < slots_per_rank]
        rank = min(open_ranks, key=lambda r: (expert in held[r], totals[r], len(held[r]), r))
        held[rank].append(expert)
        totals[rank] += share
    return ExpertPlacement(tuple(expert for experts in held for expert in sorted(experts)), len(loads), num_ranks)


def rebalance(old: ExpertPlacement, loads: Sequence[float]) -> ExpertPlacement:
    """A better placement for these loads, in which what stays on a rank stays in its place; `old` itself when none is
    better by enough."""
    plan = plan_placement(loads, old.num_ranks, old.slots_per_rank)
    worst = max(old.rank_loads(loads))
    if not max(plan.rank_loads(loads)) < worst * (1 - _LEAST_GAIN):
        return old
    kept = [_keep_places(old.of_rank(rank), plan.of_rank(rank)) for rank in range(old.num_ranks)]
    return ExpertPlacement(tuple(expert for experts in kept for expert in experts), old.num_experts, old.num_ranks)


def plan_moves(old: ExpertPlacement, new: ExpertPlacement) -> list[Move]:
    """What each place that changes is filled from: a place of its rank if one has the expert, else the expert's places
    in turn, so that no rank has to send all."""
    size, places = old.slots_per_rank, old.places()
    sent = [0] * old.num_ranks
    moves = []
    for target, expert in enumerate(new.experts):
        if old.experts[target] == expert:
            continue
        source = min(places[expert], key=lambda p: (p // size != target // size, sent[p // size], p))
        sent[source // size] += source // size != target // size
        moves.append(Move(source, target))
    return moves


def imbalance(loads: Sequence[float]) -> float:
    """The largest of these loads by their mean; 1 when nothing was done."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def _count_copies(loads: Sequence[float], num_places: int) -> list[int]:
    """Places of each expert, at least one."""
    copies = [1] * len(loads)
    queue = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(queue)
    for _ in range(num_places - len(loads)):
        _, expert = heapq.heappop(queue)
        copies[expert] += 1
        heapq.heappush(queue, (-loads[expert] / copies[expert], expert))
    return copies


def _keep_places(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """The new experts of a rank, each that was there before in a place it had."""
    coming = list(new)
    kept: list[int | None] = []
    for expert in old:
        stays = expert in coming
        if stays:
            coming.remove(expert)
        kept.append(expert if stays else None)
    return [coming.pop(0) if expert is None else expert for expert in kept]
