"""Block hashes: stable, chained, kept apart by salt and block size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonar.block_hash import HASH_BYTES, block_hash, extend_hashes, hash_blocks, root_hash

TOKENS = st.lists(st.integers(0, 200_000), max_size=60)


def test_known_values() -> None:
    # Written down, so that a head and an engine of other versions or byte orders are seen to disagree.
    assert root_hash("", 16).hex() == "f78d3dd2fb5200eadde9cda22f61dfa9"
    assert [h.hex() for h in hash_blocks(range(8), 4, "tenant")] == [
        "676608d09989a9e1704d86707e5dab9e",
        "d7285c3d8ba26987f02a0e77d09c8cc5",
    ]


def test_chain_is_root_then_blocks() -> None:
    first = block_hash(root_hash("s", 2), [7, 8])
    assert hash_blocks([7, 8, 9, 10, 11], 2, "s") == [first, block_hash(first, [9, 10])]


@given(TOKENS, TOKENS, st.sampled_from([1, 4, 16]))
def test_equal_hash_means_equal_prefix(a: list[int], b: list[int], size: int) -> None:
    for i, (x, y) in enumerate(zip(hash_blocks(a, size), hash_blocks(b, size))):
        assert (x == y) == (a[: (i + 1) * size] == b[: (i + 1) * size])


@given(TOKENS, st.integers(0, 60), st.sampled_from([1, 4, 16]))
def test_growing_gives_the_hashes_of_the_whole(tokens: list[int], cut: int, size: int) -> None:
    root = root_hash("", size)
    grown: list[bytes] = []
    extend_hashes(grown, tokens[:cut], size, root)
    extend_hashes(grown, tokens, size, root)
    assert grown == hash_blocks(tokens, size)
    assert len(grown) == len(tokens) // size
    assert all(len(h) == HASH_BYTES for h in grown)


def test_same_block_after_another_prefix_differs() -> None:
    assert hash_blocks([1, 2, 5, 6], 2)[1] != hash_blocks([3, 4, 5, 6], 2)[1]


def test_salt_and_block_size_part_chains() -> None:
    roots = {root_hash(salt, size) for salt in ("", "a", "b", "4 ", " ") for size in (4, 44, 8)}
    assert len(roots) == 15


def test_extra_changes_the_hash() -> None:
    parent = root_hash("", 2)
    assert len({block_hash(parent, [1, 2], extra) for extra in (b"", b"image", b"\0")}) == 3


def test_id_beyond_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        block_hash(root_hash("", 1), [2**31])
