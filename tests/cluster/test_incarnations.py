"""The durable ceiling: no number twice over restarts, few writes, no wait while the store is away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.events import DeploymentApplied
from cluster.incarnations import STEP, IncarnationCeiling
from cluster.records import ReplicaState
from cluster.store.contract import StoreUnavailableError
from tests.cluster.world import World, deployment


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
            ceiling.saw(number)
            given_before = number
            if ceiling.is_near:
                ceiling.raise_ceiling()
    assert store.writes <= len(starts_of_each_life) + sum(starts_of_each_life) / (STEP // 2) + 1


def test_many_replicas_share_one_number() -> None:
    store = Pairs()
    ceiling = IncarnationCeiling(store)
    for _ in range(1000):
        ceiling.saw(1)
    assert store.writes == 1 and not ceiling.is_near


def test_what_cannot_be_written_is_not_promised() -> None:
    store = Pairs()
    ceiling = IncarnationCeiling(store)
    ceiling.saw(STEP // 2 + 1)
    assert ceiling.is_near
    ceiling.raise_ceiling()
    assert not ceiling.is_near and store.writes == 2
    promised = ceiling.ceiling
    store.is_away = True
    ceiling.saw(promised)
    with pytest.raises(StoreUnavailableError):
        ceiling.raise_ceiling()
    assert ceiling.ceiling == promised
    with pytest.raises(AssertionError):
        ceiling.saw(promised + 1)


def test_without_a_number_a_replica_waits_and_says_so() -> None:
    world = World()
    world.state.incarnations.limit = 1
    agent = world.join("a")
    world.handle(DeploymentApplied(deployment(replicas=2)))
    world.settle(0.5)
    assert world.ready() == ["m-0", "m-1"]
    world.exit(agent, next(iter(agent.workers)), signal=9)
    world.settle(3.0)
    (waiting,) = [r for r in world.state.replicas.values() if r.state is ReplicaState.PLACING]
    assert len(world.ready()) == 1 and "incarnation 2 waits for the head's store" in waiting.note
    world.state.incarnations.limit = 2
    world.settle(0.5)
    assert world.ready() == ["m-0", "m-1"] and not waiting.note


def test_without_a_store_no_head_starts() -> None:
    store = Pairs()
    store.is_away = True
    with pytest.raises(StoreUnavailableError):
        IncarnationCeiling(store)
