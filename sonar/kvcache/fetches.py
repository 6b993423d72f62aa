"""Blocks of a sequence that another replica has, on their way into this one's cache.

Owner of the blocks from the moment they are set aside until they are in the prefix cache, free, or found to be still
written to by a read that was given up. Knows nothing of peers or messages. Called by the scheduler (`begin`, `end`) and
by the exchange (what was read).

**Why a read must not start at once.** A block set aside may have been returned while a step under way still writes it
(`sonar.kvcache.manager`). Steps are not ordered against reads, so the first read waits for the steps that had been
handed out (`BlockFetch.after_step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from sonar.config import LayerKind
from sonar.kvcache.manager import KVCacheManager
from sonar.kvcache.request_blocks import RequestBlocks


class BlockFetch:
    """Blocks `first` .. `end` - 1 of one sequence, of which a sliding group wants the last few alone.

    Attributes:
        after_step: reads may begin when so many steps are done.
        starts: per group, index of the first block that is wanted.
        missing: per group, blocks that are not read yet, by index; the last one read empties it.
        reading: of those, the ones that a read under way may write.
        is_over: its request has no use for it any more, or it is complete.
    """

    def __init__(self, first: int, end: int, after_step: int, hashes: Sequence[bytes], root: bytes) -> None:
        self.first = first
        self.end = end
        self.after_step = after_step
        self.hashes = hashes
        self.root = root
        self.starts: list[int] = []
        self.missing: list[dict[int, int]] = []
        self.reading: list[dict[int, int]] = []
        self.kept: list[list[int]] = []
        self.is_over = False

    @property
    def is_complete(self) -> bool:
        """Whether every block was read."""
        return not any(self.missing) and not any(self.reading)

    @property
    def num_wanted(self) -> int:
        """Blocks of the sequence that are to come, in the group that wants most."""
        return self.end - min(self.starts)

    @property
    def num_missing(self) -> int:
        """Of those, blocks that have not come."""
        return max(len(missing) + len(reading) for missing, reading in zip(self.missing, self.reading))


class BlockFetches:
    """Owner of the fetches that are not over, and of blocks in quarantine."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._open: list[BlockFetch] = []
        self._coming: dict[bytes, BlockFetch] = {}

    def __len__(self) -> int:
        return len(self._open)

    def brings(self, block_hash: bytes) -> bool:
        """Whether a fetch under way will bring this block."""
        return block_hash in self._coming

    def begin(self, blocks: RequestBlocks, hit: int, end: int, after_step: int, spare: float) -> BlockFetch | None:
        """Sets blocks aside for the part of a sequence that is not cached, and keeps the part that is.

        Args:
            blocks: empty tables, with the hashes of the sequence. hit: what `find_prefix` just said.
            spare: share of each pool's blocks to leave alone.
        Returns:
            None, and nothing changed, when there are too few blocks.
        """
        size = self._cache.block_size
        plan = []
        for group, pool in zip(self._cache.groups, self._cache.pools):
            is_full = group.kind is LayerKind.FULL
            start = hit if is_full else group.first_block(end * size, size)
            kept = pool.lookup(blocks.hashes[:hit]) if is_full else []
            needed = end - start + pool.count_idle(kept)
            if needed + ceil(spare * pool.num_blocks) > pool.num_available:
                return None
            plan.append((pool, start, kept))
        fetch = BlockFetch(hit, end, after_step, blocks.hashes[:end], blocks.root)
        for pool, start, kept in plan:
            pool.acquire(kept)
            fetch.kept.append(kept)
            fetch.starts.append(start)
            fetch.missing.append(dict(zip(range(start, end), pool.take_in_transit(end - start))))
            fetch.reading.append({})
        self._open.append(fetch)
        self._coming.update(dict.fromkeys(fetch.hashes[hit:end], fetch))
        return fetch

    def begin_read(self, fetch: BlockFetch, group: int, indices: Sequence[int]) -> list[int]:
        """A read of these blocks, all missing, begins; where it shall write them."""
        assert not fetch.is_over, "a read for a fetch that is over"
        ids = [fetch.missing[group].pop(index) for index in indices]
        fetch.reading[group].update(zip(indices, ids))
        return ids

    def end_read(self, fetch: BlockFetch, group: int, indices: Sequence[int], is_whole: bool) -> None:
        """The read has ended and writes nothing more. Whole blocks enter the prefix cache; others are missing again."""
        pool = self._cache.pools[group]
        for index in indices:
            block = fetch.reading[group].pop(index)
            if fetch.is_over:
                pool.drop_in_transit([block])
            elif is_whole:
                pool.land([block])
                fetch.kept[group].append(block)
                parent = fetch.hashes[index - 1] if index else fetch.root
                pool.register(block, fetch.hashes[index], parent)
            else:
                fetch.missing[group][index] = block

    def end(self, fetch: BlockFetch) -> None:
        """Its request goes on without it: what was read stays in the cache, the rest is free, or quarantined while a
        read may still write it."""
        assert not fetch.is_over
        fetch.is_over = True
        self._open.remove(fetch)
        for block_hash in fetch.hashes[fetch.first : fetch.end]:
            if self._coming.get(block_hash) is fetch:
                del self._coming[block_hash]
        for pool, kept, missing, reading in zip(self._cache.pools, fetch.kept, fetch.missing, fetch.reading):
            pool.release(kept)
            kept.clear()
            pool.drop_in_transit(missing.values())
            missing.clear()
            pool.quarantine(reading.values())

    def kept(self) -> list[list[list[int]]]:
        """Blocks in use by each open fetch, per group; for checks."""
        return [fetch.kept for fetch in self._open]
