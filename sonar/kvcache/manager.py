"""The KV cache of a replica as the scheduler sees it: prefix look-up, growth, window, registration, return of blocks.

Knows tokens only as ids to hash, and requests only as the `RequestBlocks` it is handed; which request gets blocks is
the scheduler's decision. Called by the scheduler.

**Why blocks may change hands while a step that uses them is under way.** Steps are executed in the order they are
scheduled, on every rank. A block returned while scheduling step N + 1 (or on an abort, or when a result says that a
request has ended) may still be read or written by step N; whoever gets it next uses it in step N + 1 or later, after
step N is done with it. For the same reason a block may be registered as soon as the step that fills it is scheduled:
only later steps can find it. What this needs, and the scheduler keeps true: every scheduled step is executed, in order,
and a request admitted to a step never finds blocks that this same step fills. Transfers to or from peers are not
ordered by steps; their blocks are kept apart (`BlockPool.take_in_transit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from sonar.block_hash import extend_hashes, root_hash
from sonar.config import LayerKind
from sonar.kvcache.block_pool import BlockCounts, BlockPool
from sonar.kvcache.event_log import KVEventLog
from sonar.kvcache.groups import CacheGroup
from sonar.kvcache.request_blocks import NEVER, RequestBlocks
from sonar.messages import KVEvent


class KVCacheManager:
    """Owner of the block pools, one a cache group. A sequence's blocks are the same count of tokens in every group.

    Args:
        groups: at least one. num_blocks: of each group's pool.
        block_size: tokens a block.
        enable_prefix_caching: whether full blocks can be found by their hash.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        assert groups and len(groups) == len(num_blocks), f"{num_blocks} blocks for {len(groups)} groups"
        self.groups = tuple(groups)
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self._events = KVEventLog()
        # The router needs one chain of events. Full layers keep every block of a prefix, sliding ones only the last.
        told = next((g for g, group in enumerate(groups) if group.kind is LayerKind.FULL), 0)
        self.pools = tuple(BlockPool(count, self._events if g == told else None) for g, count in enumerate(num_blocks))

    # --- a request's way through the cache ---

    def new_blocks(self, cache_salt: str) -> RequestBlocks:
        """Empty tables for a request; it shares prefixes with requests of an equal salt."""
        blocks = RequestBlocks(len(self.groups), root_hash(cache_salt, self.block_size))
        blocks.register_at = self.block_size if self.is_caching else NEVER
        return blocks

    def find_prefix(self, blocks: RequestBlocks, token_ids: Sequence[int]) -> int:
        """Blocks at the sequence's start that need not be computed, in every group; never all of its tokens.

        A full group must hold all of them, a sliding group only those that the next token's window reaches. Hashes all
        full blocks of the sequence on the way. To be asked only when prefix caching is on.
        """
        assert self.is_caching, "prefix caching is off"
        extend_hashes(blocks.hashes, token_ids, self.block_size, blocks.root)
        hit = (len(token_ids) - 1) // self.block_size
        before = -1
        while hit != before:
            before = hit
            for group, pool in zip(self.groups, self.pools):
                if group.kind is LayerKind.FULL:
                    hit = pool.match_run(blocks.hashes, hit)
                else:
                    hit = self._match_window(group, pool, blocks.hashes, hit)
        return hit

    def admit(self, blocks: RequestBlocks, hit: int, num_tokens: int, end: int, spare: float) -> bool:
        """Gives a request its cached prefix and, in full groups, room for all its known tokens at once.

        All at once, so that a prompt computed in chunks is never half done and out of blocks, with the next in line
        holding the rest. Sliding groups need a bounded number; `grow` takes those chunk by chunk.

        Args:
            blocks: empty. hit: what `find_prefix` just said.
            num_tokens: known tokens.
            end: how far the first chunk is to reach; where a sliding group has too little for that, its window will do.
            spare: share of each pool's blocks to leave for requests that run already.
        Returns:
            False, and nothing changed, when there are too few blocks.
        """
        size = self.block_size
        found = []
        for group, pool in zip(self.groups, self.pools):
            first = min(hit, group.first_block(hit * size, size))
            ids = pool.lookup(blocks.hashes[first:hit])
            until = num_tokens if group.kind is LayerKind.FULL else min(end, hit * size + group.window)
            needed = -(-until // size) - hit + pool.count_idle(ids)
            if needed + ceil(spare * pool.num_blocks) > pool.num_available:
                return False
            found.append((first, ids))
        for group, pool, table, (first, ids) in zip(self.groups, self.pools, blocks.tables, found):
            pool.acquire(ids)
            table.begin(first, ids)
            if group.kind is LayerKind.FULL:
                ids.extend(pool.take(-(-num_tokens // size) - hit))
        blocks.num_registered = hit
        blocks.register_at = (hit + 1) * size if self.is_caching else NEVER
        return True

    def grow(self, blocks: RequestBlocks, start: int, end: int) -> int:
        """Makes room to compute positions start .. end-1, after returning what their windows do not reach any more.

        Args:
            start: tokens computed or being computed; the tables have room for them.
        Returns:
            how far there is room now: `end`, or less when blocks are short; `start` when not even one more fits.
        """
        size = self.block_size
        for group, pool, table in zip(self.groups, self.pools, blocks.tables):
            first = min(group.first_block(start, size), table.end)
            if first > table.first:
                pool.release(table.ids[: first - table.first])
                del table.ids[: first - table.first]
                table.first = first
        for pool, table in zip(self.pools, blocks.tables):
            end = min(end, (table.end + pool.num_available) * size)
        if end <= start:
            return start
        quiet_end = NEVER
        for group, pool, table in zip(self.groups, self.pools, blocks.tables):
            missing = -(-end // size) - table.end
            if missing > 0:
                table.ids.extend(pool.take(missing))
            quiet_end = min(quiet_end, table.end * size)
            if group.kind is LayerKind.SLIDING:
                # The oldest block is out of reach from this start on; a decode to n tokens starts at n - 1.
                quiet_end = min(quiet_end, (table.first + 1) * size + group.window - 1)
        blocks.quiet_end = quiet_end
        return end

    def register(self, blocks: RequestBlocks, token_ids: Sequence[int], num_computed: int) -> None:
        """Lets others find the blocks that are full of known tokens.

        Args:
            num_computed: tokens computed by the steps scheduled so far.
        """
        size = self.block_size
        full = min(num_computed, len(token_ids)) // size
        if not self.is_caching or full <= blocks.num_registered:
            return
        hashes = blocks.hashes
        if len(hashes) < full:
            extend_hashes(hashes, token_ids, size, blocks.root)
        for pool, table in zip(self.pools, blocks.tables):
            for i in range(max(blocks.num_registered, table.first), full):
                pool.register(table.ids[i - table.first], hashes[i], hashes[i - 1] if i else blocks.root)
        blocks.num_registered = full
        blocks.register_at = (full + 1) * size

    def free(self, blocks: RequestBlocks) -> None:
        """Returns all blocks; hashes stay, for the request may come back with the same tokens."""
        for pool, table in zip(self.pools, blocks.tables):
            pool.release(table.ids)
            table.begin(0, [])
        blocks.num_registered = 0

    # --- figures ---

    def shortage(self, num_tokens: int) -> str:
        """Why a sequence of `num_tokens` could never be computed, even alone; empty when it could."""
        for group, pool in zip(self.groups, self.pools):
            needed = group.max_blocks(num_tokens, 1, self.block_size)
            if needed > pool.num_blocks:
                return (
                    f"{num_tokens} tokens need {needed} blocks of {self.block_size} tokens in the {group.kind.value} "
                    f"layers and there are {pool.num_blocks}"
                )
        return ""

    def counts(self) -> BlockCounts:
        """Blocks by state, summed over the groups."""
        return BlockCounts(*(sum(column) for column in zip(*(pool.counts() for pool in self.pools))))

    def take_events(self) -> list[KVEvent]:
        """Net changes of the prefix cache since the last call."""
        return self._events.take()

    def check(self, holders: Iterable[RequestBlocks], kept: Iterable[list[list[int]]] = ()) -> None:
        """Asserts that no block is lost or owned twice, given everyone that holds blocks. O(blocks).

        Args:
            kept: what transfers hold, per group.
        """
        held = [[table.ids for table in blocks.tables] for blocks in holders]
        held += kept
        for g, pool in enumerate(self.pools):
            users: dict[int, int] = {}
            for of_request in held:
                ids = of_request[g]
                assert len(set(ids)) == len(ids), f"a table holds a block twice: {ids}"
                for block in ids:
                    users[block] = users.get(block, 0) + 1
            pool.check(users)

    def _match_window(self, group: CacheGroup, pool: BlockPool, hashes: Sequence[bytes], hit: int) -> int:
        """The most blocks, at most `hit`, such that the window of the token after them is cached."""
        while hit > 0:
            missing = pool.match_last(hashes, group.first_block(hit * self.block_size, self.block_size), hit)
            if missing < 0:
                return hit
            hit = missing
        return 0
