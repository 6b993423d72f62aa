"""The durable ceiling: no number twice over restarts, few writes, no wait while the store is away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.incarnations import STEP, IncarnationCeiling
from cluster.store.contract import StoreUnavailableError


class Pairs:
    """A store that can be away, and counts writes."""

    def __init__(self) -> None:
        self.pairs: dict[str, bytes] = {}
        self.writes = 0
        self.is_away = False

    def get(self, key: str) -> bytes | None:
        return self.pairs.get(key)

    def put(self, key: str, value: bytes) -> None:
        if self.is_away:
            raise StoreUnavailableError("away")
        self.writes += 1
        self.pairs[key] = value


@given(st.lists(st.integers(0, 3 * STEP), min_size=1, max_size=6))
def test_no_number_is_given_twice_over_restarts(starts_of_each_life) -> None:
    store, given_before = Pairs(), 0
    for starts in starts_of_each_life:
        ceiling = IncarnationCeiling(store)
        assert ceiling.floor >= given_before
        for number in range(ceiling.floor + 1, ceiling.floor + 1 + starts):
            ceiling.give(number)
            given_before = number
    assert store.writes <= len(starts_of_each_life) + sum(starts_of_each_life) / STEP + 1


def test_many_replicas_share_one_number() -> None:
    store = Pairs()
    ceiling = IncarnationCeiling(store)
    for _ in range(1000):
        ceiling.give(1)
    assert store.writes == 1 and not ceiling.is_near


def test_raised_in_time_a_start_does_not_wait_for_the_store() -> None:
    store = Pairs()
    ceiling = IncarnationCeiling(store)
    ceiling.give(STEP // 2 + 1)
    assert ceiling.is_near
    ceiling.raise_ceiling()
    assert not ceiling.is_near and store.writes == 2
    store.is_away = True
    ceiling.give(STEP + STEP // 2)
    with pytest.raises(StoreUnavailableError):
        ceiling.give(2 * STEP + 1)


def test_without_a_store_no_head_starts() -> None:
    store = Pairs()
    store.is_away = True
    with pytest.raises(StoreUnavailableError):
        IncarnationCeiling(store)
