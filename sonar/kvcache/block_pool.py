"""The blocks of one cache group: who may use which, what they hold, what is thrown out first.

Every block is in exactly one state: free (holds nothing of use), cached (holds a hashed block nobody uses now), in use
(one or more requests), in transit (a transfer may write it), or quarantined (a transfer that was given up may).
Knows nothing of tokens, requests or memory. Called by `KVCacheManager` and `BlockFetches`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sonar.kvcache.event_log import KVEventLog


class BlockCounts(NamedTuple):
    """Blocks by state. Invariant: free + cached + in_use + in_transit + quarantined == total."""

    free: int
    cached: int
    in_use: int
    in_transit: int
    quarantined: int
    total: int

    @property
    def is_complete(self) -> bool:
        """Whether the invariant holds: no block lost, none counted twice."""
        return self.free + self.cached + self.in_use + self.in_transit + self.quarantined == self.total


class BlockPool:
    """Owner of which block is in which state. All operations are O(1) a block.

    Args:
        num_blocks: ids are 0 .. num_blocks - 1.
        events: told of each block that enters or leaves the prefix cache; None when nobody listens.

    Attributes:
        num_available: blocks that `take` could hand out: free and cached ones.
    """

    def __init__(self, num_blocks: int, events: KVEventLog | None = None) -> None:
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self.num_available = num_blocks
        self._events = events
        self._num_in_use = 0
        self._refs = [0] * num_blocks
        # Lowest id on top, and what was freed last is used next: its memory is the warmest.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Cached blocks without a user, least recently used first. Not a dict: finding the first key of a dict whose
        # first keys were deleted is linear.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._in_transit: set[int] = set()
        self._quarantined: set[int] = set()

    # --- taking and returning ---

    def take(self, count: int) -> list[int]:
        """Blocks with one user each and arbitrary contents; evicts the least recently used cached ones when short.

        `count` is at most `num_available`.
        """
        blocks = self._remove_available(count)
        refs = self._refs
        for block in blocks:
            refs[block] = 1
        self._num_in_use += count
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Adds a user to each of these blocks, which are cached or in use."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
                self.num_available -= 1
                self._num_in_use += 1
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes a user from each block. One without users becomes cached when it has a hash, else free.

        Args:
            blocks: in the order of the sequence; its end is evicted first, as a chain lacking its end still serves.
        """
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            assert refs >= 0, f"block {block} released without a user"
            self._refs[block] = refs
            if refs == 0:
                self._num_in_use -= 1
                self.num_available += 1
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    # --- prefix cache ---

    def register(self, block: int, block_hash: bytes, parent_hash: bytes) -> None:
        """Says what a block in use holds (or will, once the steps handed out so far are done).

        Nothing happens when another block holds the same already: this one is freed after use.
        """
        assert self._refs[block] > 0 and self._hash_of[block] is None, f"block {block} registered twice or without user"
        if block_hash in self._by_hash:
            return
        self._by_hash[block_hash] = block
        self._hash_of[block] = block_hash
        if self._events is not None:
            self._events.stored(block_hash, parent_hash)

    def match_run(self, hashes: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` hashes are cached without a gap."""
        by_hash = self._by_hash
        for i in range(limit):
            if hashes[i] not in by_hash:
                return i
        return limit

    def match_last(self, hashes: Sequence[bytes], first: int, end: int) -> int:
        """Index of the last hash of hashes[first:end] that is not cached, or -1."""
        by_hash = self._by_hash
        for i in range(end - 1, first - 1, -1):
            if hashes[i] not in by_hash:
                return i
        return -1

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold these hashes, all of which are cached."""
        by_hash = self._by_hash
        return [by_hash[block_hash] for block_hash in hashes]

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have no user, so that acquiring them leaves fewer to take."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    # --- transfers ---

    def take_in_transit(self, count: int) -> list[int]:
        """Blocks that a transfer is going to write; nobody else gets them until `land`, `drop_in_transit`, or
        `quarantine` and what follows it."""
        blocks = self._remove_available(count)
        self._in_transit.update(blocks)
        return blocks

    def land(self, blocks: Iterable[int]) -> None:
        """The transfer has written these blocks: each gets one user."""
        for block in blocks:
            self._in_transit.remove(block)
            self._refs[block] = 1
            self._num_in_use += 1

    def drop_in_transit(self, blocks: Iterable[int]) -> None:
        """Nothing will write these blocks, in transit or quarantined, any more: they become free."""
        for block in blocks:
            (self._quarantined if block in self._quarantined else self._in_transit).remove(block)
            self._free.append(block)
            self.num_available += 1

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Nobody waits for these blocks in transit any more, but they may still be written."""
        for block in blocks:
            self._in_transit.remove(block)
            self._quarantined.add(block)

    # --- figures ---

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        in_transit, quarantined = len(self._in_transit), len(self._quarantined)
        return BlockCounts(len(self._free), len(self._idle), self._num_in_use, in_transit, quarantined, self.num_blocks)

    def cached_hashes(self) -> set[bytes]:
        """Hashes that a prefix may be found under; for tests and diagnosis."""
        return set(self._by_hash)

    def check(self, users: dict[int, int] | None = None) -> None:
        """Asserts that every block is in exactly one state and that the maps agree. O(blocks).

        Args:
            users: block -> users as the owners of block tables count them; None when they are not known.
        """
        used = {block: refs for block, refs in enumerate(self._refs) if refs}
        states = [*self._free, *self._idle, *used, *self._in_transit, *self._quarantined]
        assert sorted(states) == list(range(self.num_blocks)), f"blocks lost or owned twice: {sorted(states)}"
        assert self.counts().is_complete, f"counts do not add up: {self.counts()}"
        assert self.num_available == len(self._free) + len(self._idle), f"num_available={self.num_available}"
        named = {block: name for block, name in enumerate(self._hash_of) if name is not None}
        assert named == {block: name for name, block in self._by_hash.items()}, "hash maps disagree"
        assert self._idle.keys() <= named.keys(), "a cached block has no hash"
        written = self._in_transit | self._quarantined
        assert not named.keys() & (set(self._free) | written), "a free block or one in transit has a hash"
        assert users is None or users == used, f"tables count {users}, the pool {used}"

    def _remove_available(self, count: int) -> list[int]:
        assert count <= self.num_available, f"{count} blocks of {self.num_available} available"
        self.num_available -= count
        free = self._free
        blocks = [free.pop() for _ in range(min(count, len(free)))]
        while len(blocks) < count:
            blocks.append(self._evict())
        return blocks

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        block_hash = self._hash_of[block]
        assert block_hash is not None, f"cached block {block} has no hash"
        self._hash_of[block] = None
        del self._by_hash[block_hash]
        if self._events is not None:
            self._events.removed(block_hash)
        return block
