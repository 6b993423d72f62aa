"""The pool: states of blocks, eviction order, reference counts, transfers."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sonar.kvcache.block_pool import BlockPool
from sonar.kvcache.event_log import KVEventLog
from sonar.messages import BlockRemoved, BlockStored, KVEvent

ROOT = b"root"


def _name(number: int) -> bytes:
    return b"hash%d" % number


def _cached(pool: BlockPool, *numbers: int) -> list[int]:
    """Blocks registered under these numbers and released, in order."""
    blocks = pool.take(len(numbers))
    for block, number in zip(blocks, numbers):
        pool.register(block, _name(number), ROOT)
        pool.release([block])
    return blocks


def test_counts_follow_a_block_through_its_states() -> None:
    pool = BlockPool(3)
    assert pool.counts() == (3, 0, 0, 0, 0, 3)
    (block,) = pool.take(1)
    assert pool.counts() == (2, 0, 1, 0, 0, 3)
    pool.register(block, _name(1), ROOT)
    pool.release([block])
    assert pool.counts() == (2, 1, 0, 0, 0, 3)
    assert pool.num_available == 3
    pool.acquire([block])
    assert pool.counts() == (2, 0, 1, 0, 0, 3)
    moving = pool.take_in_transit(1)
    assert pool.counts() == (1, 0, 1, 1, 0, 3)
    pool.check({block: 1})
    pool.land(moving)
    assert pool.counts() == (1, 0, 2, 0, 0, 3)
    pool.check({block: 1, moving[0]: 1})


def test_free_blocks_go_before_cached_ones_and_the_oldest_cached_first() -> None:
    pool = BlockPool(4)
    one, two, three = _cached(pool, 1, 2, 3)
    pool.acquire([one])
    pool.release([one])
    taken = pool.take(3)
    assert not {one} & set(taken)
    assert taken[1:] == [two, three]
    assert pool.match_run([_name(1), _name(2)], 2) == 1


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for number, block in enumerate(blocks):
        pool.register(block, _name(number), ROOT)
    pool.release(blocks)
    assert pool.take(2) == [blocks[2], blocks[1]]


def test_a_shared_block_stays_in_use_until_its_last_user_leaves() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.register(block, _name(1), ROOT)
    pool.acquire([block])
    pool.release([block])
    assert pool.num_available == 0
    pool.release([block])
    assert pool.num_available == 1


def test_a_second_block_with_the_same_contents_is_not_cached() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.register(first, _name(1), ROOT)
    pool.register(second, _name(1), ROOT)
    pool.release([first, second])
    assert pool.counts() == (1, 1, 0, 0, 0, 2)
    assert pool.lookup([_name(1)]) == [first]
    pool.check({})


def test_match_last_finds_the_last_gap() -> None:
    pool = BlockPool(4)
    _cached(pool, 0, 2, 3)
    names = [_name(i) for i in range(5)]
    assert pool.match_last(names, 0, 4) == 1
    assert pool.match_last(names, 2, 4) == -1
    assert pool.match_last(names, 4, 4) == -1


def test_a_dropped_transfer_frees_its_blocks() -> None:
    pool = BlockPool(2)
    moving = pool.take_in_transit(2)
    assert pool.num_available == 0
    pool.drop_in_transit(moving)
    assert pool.counts() == (2, 0, 0, 0, 0, 2)


def test_misuse_is_caught() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="1 available"):
        pool.take(2)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="without a user"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="without user"):
        pool.register(0, _name(1), ROOT)


@pytest.mark.parametrize("harm", ["lost", "twice", "users"])
def test_check_sees_harm(harm: str) -> None:
    pool = BlockPool(3)
    blocks = pool.take(2)
    users = dict.fromkeys(blocks, 1)
    pool.check(users)
    if harm == "lost":
        pool._free.pop()
    elif harm == "twice":
        pool._free.append(blocks[0])
    else:
        users[blocks[0]] = 2
    with pytest.raises(AssertionError):
        pool.check(users)


class PoolMachine(RuleBasedStateMachine):
    """Against a plain model: block -> users, hash -> block, and what a reader of the events believes."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks: int) -> None:
        self.log = KVEventLog()
        self.pool = BlockPool(num_blocks, self.log)
        self.users: dict[int, int] = {}
        self.moving: list[int] = []
        self.believed: set[bytes] = set()

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        for block in self.pool.take(min(count, self.pool.num_available)):
            assert block not in self.users and block not in self.moving
            self.users[block] = 1

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.users)))
        self.pool.release([block])
        self.users[block] -= 1
        if not self.users[block]:
            del self.users[block]

    @precondition(lambda self: self.users)
    @rule(data=st.data(), number=st.integers(0, 5))
    def register(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.users)))
        if self.pool._hash_of[block] is None:
            self.pool.register(block, _name(number), ROOT)

    @rule(number=st.integers(0, 5))
    def acquire(self, number: int) -> None:
        if self.pool.match_run([_name(number)], 1):
            (block,) = self.pool.lookup([_name(number)])
            self.pool.acquire([block])
            self.users[block] = self.users.get(block, 0) + 1

    @rule()
    def begin_transfer(self) -> None:
        if self.pool.num_available:
            self.moving += self.pool.take_in_transit(1)

    @precondition(lambda self: self.moving)
    @rule(lands=st.booleans())
    def end_transfer(self, lands: bool) -> None:
        block = self.moving.pop()
        if lands:
            self.pool.land([block])
            self.users[block] = 1
        else:
            self.pool.drop_in_transit([block])

    @rule()
    def read_events(self) -> None:
        self.believed = _apply(self.believed, self.log.take())
        assert self.believed == self.pool.cached_hashes()

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.users)
            assert self.pool.counts().in_transit == len(self.moving)


def _apply(known: set[bytes], events: list[KVEvent]) -> set[bytes]:
    known = set(known)
    for event in events:
        match event:
            case BlockStored(block_hash=name):
                assert name not in known
                known.add(name)
            case BlockRemoved(block_hash=name):
                known.remove(name)
    return known


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
