"""Which blocks a replica's prefix cache holds, and which replicas hold a block, from their own events; never guessed.

Bounded by the replicas' numbers of blocks. Does not hash (`sonar.block_hash`) nor choose. Called by
`cluster.routing.routes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sonar.messages import BlockRemoved, BlockStored, KVEvents


class BlockHolders:
    """Which replicas hold a block: the way from a prompt to its replicas that does not look at each of them.

    Most blocks are one replica's alone: that one's name is kept without a set around it.
    """

    def __init__(self) -> None:
        self._of: dict[bytes, str | set[str]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, block_hash: bytes, replica_id: str) -> None:
        """A replica holds it."""
        holders = self._of.setdefault(block_hash, replica_id)
        if isinstance(holders, set):
            holders.add(replica_id)
        elif holders != replica_id:
            self._of[block_hash] = {holders, replica_id}

    def discard(self, block_hash: bytes, replica_id: str) -> None:
        """A replica does not hold it (any more)."""
        holders = self._of.get(block_hash)
        if isinstance(holders, set):
            holders.discard(replica_id)
            if len(holders) == 1:
                self._of[block_hash] = holders.pop()
        elif holders == replica_id:
            del self._of[block_hash]

    def of(self, block_hash: bytes) -> set[str]:
        """Replicas that hold it; not to be changed."""
        holders = self._of.get(block_hash, ())
        return holders if isinstance(holders, set) else {holders} if holders else set()


class PrefixIndex:
    """Owns the hashes of one replica's cached blocks, and keeps its part of the holders."""

    def __init__(self, replica_id: str, max_blocks: int, holders: BlockHolders) -> None:
        self._replica_id = replica_id
        self._max_blocks = max_blocks
        self._holders = holders
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
            self._clear()
        self._next_sequence = message.sequence + 1
        for event in message.events:
            match event:
                case BlockStored(block_hash=block_hash):
                    self._hashes.add(block_hash)
                    self._holders.add(block_hash, self._replica_id)
                case BlockRemoved(block_hash=block_hash):
                    self._hashes.discard(block_hash)
                    self._holders.discard(block_hash, self._replica_id)
        if len(self._hashes) > self._max_blocks:
            self._clear()
            return False
        return is_whole

    def forget(self) -> None:
        """Messages may have been lost, or the replica is gone."""
        self._clear()
        self._next_sequence = None

    def count_prefix(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that are cached. Eviction may leave holes; what is after one is of no use."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._hashes:
                return count
        return len(hashes)

    def _clear(self) -> None:
        for block_hash in self._hashes:
            self._holders.discard(block_hash, self._replica_id)
        self._hashes.clear()
