"""Where experts lie: properties of first placements, plans for measured load, and the moves between them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sonar.distributed.expert_placement import (
    ExpertPlacement,
    first_placement,
    imbalance,
    plan_moves,
    plan_placement,
    rebalance,
)

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 24), st.integers(0, 12))
LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=24)


@given(SIZES)
def test_every_expert_has_a_place_and_ranks_hold_as_many(sizes):
    num_ranks, num_experts, num_redundant = sizes
    placement = first_placement(num_experts, num_ranks, num_redundant)
    assert len(placement.experts) >= num_experts + num_redundant
    assert len(placement.experts) < num_experts + num_redundant + num_ranks, "no more than the next multiple"
    assert {expert for rank in range(num_ranks) for expert in placement.of_rank(rank)} == set(range(num_experts))
    assert sorted(p for places in placement.places() for p in places) == list(range(len(placement.experts)))


@given(LOADS, st.integers(1, 6), st.integers(0, 6))
def test_a_plan_is_no_further_from_even_than_its_heaviest_copy(loads, num_ranks, spare):
    slots = -(-len(loads) // num_ranks) + spare
    placement = plan_placement(loads, num_ranks, slots)
    ranks = placement.rank_loads(loads)
    assert abs(sum(ranks) - sum(loads)) < 1e-6, "every row is computed once"
    heaviest = max(load / len(places) for load, places in zip(loads, placement.places()))
    if spare >= len(loads):  # room is no limit then: the least loaded rank takes each copy
        assert max(ranks) - min(ranks) <= len(loads) * heaviest


@given(LOADS, st.integers(1, 6), st.integers(0, 12))
def test_a_rebalancing_helps_or_changes_nothing_and_its_moves_lead_there(loads, num_ranks, num_redundant):
    old = first_placement(len(loads), num_ranks, num_redundant)
    new = rebalance(old, loads)
    before, after = max(old.rank_loads(loads)), max(new.rank_loads(loads))
    assert new is old or after < 0.9501 * before
    held = list(old.experts)
    for move in plan_moves(old, new):
        held[move.target] = old.experts[move.source]
    assert tuple(held) == new.experts
    for rank in range(num_ranks):
        stays = set(old.of_rank(rank)) & set(new.of_rank(rank))
        sources = [m for m in plan_moves(old, new) if m.target // old.slots_per_rank == rank]
        assert all(old.experts[m.source] not in stays or m.source // old.slots_per_rank == rank for m in sources)


def test_skewed_load_is_evened_out():
    loads = [1000, 900, 10, 10, 10, 10, 10, 10]
    old = ExpertPlacement((0, 1, 2, 3, 4, 5, 6, 7), 8, 4)
    assert imbalance(old.rank_loads(loads)) > 3.8
    without_copies = rebalance(old, loads)
    assert imbalance(without_copies.rank_loads(loads)) < 2.1, "two heavy experts cannot lie on more than two ranks"
    with_copies = rebalance(first_placement(8, 4, 4), loads)
    assert imbalance(with_copies.rank_loads(loads)) < 1.1


def test_even_load_moves_nothing():
    old = first_placement(16, 4)
    assert rebalance(old, [7.0] * 16) is old
    assert rebalance(old, [0.0] * 16) is old
    assert imbalance([0.0, 0.0]) == 1.0
