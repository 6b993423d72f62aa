"""Changes of the prefix cache that the head's router has not been told yet.

Keeps net changes only: a block stored and evicted between two readings never shows. So the log is bounded by twice the
pool's blocks even when nobody reads it, and no reader has to be told of a loss. Events of one reading may name a child
before its parent. Called by `BlockPool` and, through the manager, by the engine loop.
"""

from __future__ import annotations

from sonar.messages import BlockRemoved, BlockStored, KVEvent


class KVEventLog:
    """Owns the pending events. Applied in order to what the reader knew, they give what is cached now."""

    def __init__(self) -> None:
        self._pending: dict[bytes, KVEvent] = {}

    def stored(self, block_hash: bytes, parent_hash: bytes) -> None:
        """A block entered the cache."""
        if self._pending.pop(block_hash, None) is None:
            self._pending[block_hash] = BlockStored(block_hash, parent_hash)

    def removed(self, block_hash: bytes) -> None:
        """A cached block was evicted."""
        if self._pending.pop(block_hash, None) is None:
            self._pending[block_hash] = BlockRemoved(block_hash)

    def take(self) -> list[KVEvent]:
        """Hands out the pending events and forgets them."""
        if not self._pending:
            return []
        events = list(self._pending.values())
        self._pending.clear()
        return events
