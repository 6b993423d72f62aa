"""Which blocks a replica's prefix cache holds, from its own events; never guessed.

Bounded by the replica's number of blocks. Does not hash (`sonar.block_hash`) nor choose. Called by
`cluster.routing.routes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sonar.messages import BlockRemoved, BlockStored, KVEvents


class PrefixIndex:
    """Owns the hashes of one replica's cached blocks."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hashes: set[bytes] = set()
        self._next_sequence: int | None = None

    def __len__(self) -> int:
        return len(self._hashes)

    def apply(self, message: KVEvents) -> bool:
        """Takes changes in. After a gap, or more blocks than there are, all is forgotten: unknown is better than wrong.

        Returns False when that happened.
        """
        is_whole = self._next_sequence in (None, message.sequence)
        if not is_whole:
            self._hashes.clear()
        self._next_sequence = message.sequence + 1
        for event in message.events:
            match event:
                case BlockStored(block_hash=block_hash):
                    self._hashes.add(block_hash)
                case BlockRemoved(block_hash=block_hash):
                    self._hashes.discard(block_hash)
        if len(self._hashes) > self._max_blocks:
            self._hashes.clear()
            return False
        return is_whole

    def forget(self) -> None:
        """Messages may have been lost."""
        self._hashes.clear()
        self._next_sequence = None

    def count_prefix(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that are cached. Eviction may leave holes; what is after one is of no use."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._hashes:
                return count
        return len(hashes)
