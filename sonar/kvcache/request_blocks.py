"""What one request holds in the KV cache: a block table per group and the names of its full blocks.

Knows nothing of pools. Owned by the `Request`, filled by `KVCacheManager`, read by the scheduler.
"""

from __future__ import annotations

from typing import NamedTuple

NEVER = 1 << 62
"""More tokens than a request ever has."""


class NewEntries(NamedTuple):
    """Entries of a group's table that ranks have not been told of; `start` is the index of the first."""

    group: int
    start: int
    block_ids: list[int]


class BlockTable:
    """The request's blocks in one group.

    Attributes:
        first: table index of the oldest block held; those before it left the window, or were never needed.
        ids: blocks held, without a gap.
        num_sent: table entries before this index are known to the ranks.
    """

    __slots__ = ("first", "ids", "num_sent")

    def __init__(self) -> None:
        self.first = 0
        self.ids: list[int] = []
        self.num_sent = 0

    @property
    def end(self) -> int:
        """Table index after the newest block."""
        return self.first + len(self.ids)

    def begin(self, first: int, ids: list[int]) -> None:
        """Starts over with these blocks."""
        self.first, self.ids, self.num_sent = first, ids, first


class RequestBlocks:
    """Owner of a request's block tables and block hashes.

    Attributes:
        tables: one a cache group.
        root: parent hash of the first block. hashes: of the first full blocks of known tokens.
        num_registered: blocks whose hash has been given to the pools.
        register_at: tokens, computed and known, from which there is a block to register.
        quiet_end: the request may grow to this many tokens before a table has to change. The scheduler looks no
            further for a decode below it, which is what keeps 256 of them cheap.
    """

    __slots__ = ("hashes", "num_registered", "quiet_end", "register_at", "root", "tables")

    def __init__(self, num_groups: int, root: bytes) -> None:
        self.tables = tuple(BlockTable() for _ in range(num_groups))
        self.root = root
        self.hashes: list[bytes] = []
        self.num_registered = 0
        self.register_at = NEVER
        self.quiet_end = 0

    def take_new(self) -> list[NewEntries]:
        """Entries since the last call, for the ranks."""
        new = []
        for group, table in enumerate(self.tables):
            sent, end = max(table.num_sent, table.first), table.end
            if end > sent:
                new.append(NewEntries(group, sent, table.ids[sent - table.first :]))
                table.num_sent = end
        return new
