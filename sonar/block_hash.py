"""Names of KV blocks: a chain of hashes over the full blocks of a token sequence.

A block's hash covers every token up to its end, so that two requests that agree on one hash agree on the whole prefix
and may share that block. Stable across processes, hosts and Python versions: the head's router computes the names that
the engines' events carry. Knows nothing of blocks' memory. Called by the KV cache bookkeeping and the router.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
_TOKEN_BYTES = 4
_IS_BIG_ENDIAN = sys.byteorder == "big"
assert array("i").itemsize == _TOKEN_BYTES, "array('i') is expected to hold 32-bit integers"


def root_hash(cache_salt: str, block_size: int) -> bytes:
    """The parent of a sequence's first block.

    Covers the block size, so that every token run hashed under one root has the same length and chains of different
    block sizes never meet.

    Args:
        cache_salt: sequences share blocks only under an equal salt.
        block_size: tokens a block.
    """
    return blake2b(f"{block_size} {cache_salt}".encode(), digest_size=HASH_BYTES, person=b"sonar kv root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash of one full block: blake2b of parent, token ids (32-bit little-endian) and `extra`.

    Args:
        parent: hash of the block before, or `root_hash`.
        token_ids: the block's tokens, each in [-2^31, 2^31).
        extra: whatever else the block's contents depend on (an adapter, an image's digest).

    Raises:
        OverflowError: a token id does not fit in 32 bits.
    """
    return blake2b(parent + _token_bytes(token_ids) + extra, digest_size=HASH_BYTES).digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes) -> None:
    """Appends to `hashes`, which holds those of the first blocks, the ones of all further full blocks.

    Args:
        hashes: mutated. token_ids: the whole sequence; a last part of a block has no hash. root: `root_hash`.
    """
    first, full = len(hashes), len(token_ids) // block_size
    if first >= full:
        return
    raw = _token_bytes(token_ids[first * block_size : full * block_size])
    width = block_size * _TOKEN_BYTES
    parent = hashes[-1] if hashes else root
    for start in range(0, len(raw), width):
        # 16 bytes of parent and up to 28 tokens are one compression of blake2b: about 0.5 us a block.
        parent = blake2b(parent + raw[start : start + width], digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def hash_blocks(token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> list[bytes]:
    """Hashes of all full blocks of a sequence, in order."""
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_size, root_hash(cache_salt, block_size))
    return hashes


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    packed = array("i", token_ids)
    if _IS_BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()
