"""Messages between the leads of two replicas, carried by their head: who wants which KV blocks, and what became of it.

The side that needs blocks (the reader) asks, reads, and releases; the side that has or computes them (the holder) keeps
them for as long as it has not heard so. Frozen tagged msgspec structs, as in `sonar.messages`. A lost message ends in a
time-out and a recompute on one side, in `StillHeld` and a `ReleaseBlocks` on the other. Torch-free.
"""

from __future__ import annotations

import msgspec


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class KVLayout(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What two replicas must have in common for a block of one to mean the same in the other.

    Attributes:
        model: `ModelSource.identity`, which covers the configuration and the tokenizer.
        activations: what weights are multiplied with: other numbers, other keys and values.
        groups: kind and window of each cache group, with its layers. block_bytes: of each group.
        transport: by which blocks move.
    """

    model: str
    dtype: str
    activations: str
    block_size: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[str, ...]
    block_bytes: tuple[int, ...]
    ranks: str
    transport: str

    def difference(self, other: KVLayout) -> str:
        """The first field that is not the same, with both values; empty when all are."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {theirs!r} there and {mine!r} here"
        return ""


class KVMemory(msgspec.Struct, frozen=True, array_like=True):
    """Where a replica's blocks lie. addresses, num_blocks: of each cache group. metadata: of its transport."""

    addresses: tuple[int, ...]
    num_blocks: tuple[int, ...]
    metadata: bytes


class HeldBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one cache group, in the order of the sequence.

    Attributes:
        start: index of the first in the sequence.
        checksums: CRC-32 of each block's bytes; empty when not asked for.
    """

    group: int
    start: int
    block_ids: list[int]
    checksums: list[int] = []


class AskBlocks(_Message, frozen=True, kw_only=True):
    """Reader -> holder: blocks `first` .. `end` - 1 of a sequence, computed if need be. Answered by `BlocksReady`s, the
    last of which says so, or one `BlocksRefused`; ended by `ReleaseBlocks`.

    Attributes:
        transfer: a number of the reader's incarnation, never used again.
        token_ids: of all blocks before `end`, and one more (which is not computed).
        only_cached: they are refused if they are not all cached.
        wants_memory: the reader has not heard where the holder's blocks lie.
        wants_checksums: each block is to be verified after the read.
    """

    transfer: int
    token_ids: list[int]
    first: int
    end: int
    layout: KVLayout
    cache_salt: str = ""
    priority: int = 0
    only_cached: bool = False
    wants_memory: bool = True
    wants_checksums: bool = False


class BlocksReady(_Message, frozen=True, kw_only=True):
    """Holder -> reader: these blocks can be read, until they are released.

    Attributes:
        num_cached_tokens: tokens that the holder did not have to compute; in the last one.
    """

    transfer: int
    held: list[HeldBlocks]
    is_last: bool
    memory: KVMemory | None = None
    num_cached_tokens: int = 0


class BlocksRefused(_Message, frozen=True, kw_only=True):
    """Holder -> reader: there will be no (more) blocks for this transfer."""

    transfer: int
    reason: str


class ReleaseBlocks(_Message, frozen=True, kw_only=True):
    """Reader -> holder: no read of this transfer is under way or will be; an unknown one is ignored."""

    transfer: int


class StillHeld(_Message, frozen=True, kw_only=True):
    """Holder -> reader, once a second: these transfers are known here and not released. Answered by a `ReleaseBlocks`
    for each that the reader does not know."""

    transfers: list[int]


PeerMessage = AskBlocks | BlocksReady | BlocksRefused | ReleaseBlocks | StillHeld
