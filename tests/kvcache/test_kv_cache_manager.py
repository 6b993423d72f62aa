"""The manager: prefix look-up over groups, growth, windows, registration."""

from __future__ import annotations

from sonar.config import LayerKind
from sonar.kvcache.groups import CacheGroup
from sonar.kvcache.manager import KVCacheManager
from sonar.kvcache.request_blocks import NewEntries, RequestBlocks
from sonar.messages import BlockStored

FULL = CacheGroup(LayerKind.FULL, (0,))
WINDOW = CacheGroup(LayerKind.SLIDING, (1,), 6)
TOKENS = list(range(100, 140))


def _computed(cache: KVCacheManager, num_tokens: int, chunk: int = 4, salt: str = "") -> RequestBlocks:
    """A request whose first tokens are computed chunk by chunk and registered."""
    blocks = cache.new_blocks(salt)
    tokens = TOKENS[:num_tokens]
    assert cache.admit(blocks, 0, num_tokens, min(chunk, num_tokens), 0.0)
    for start in range(0, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        assert cache.grow(blocks, start, end) == end
        cache.register(blocks, tokens, end)
    return blocks


def _hit(cache: KVCacheManager, num_tokens: int, salt: str = "") -> int:
    return cache.find_prefix(cache.new_blocks(salt), TOKENS[:num_tokens])


def test_full_hit_is_the_longest_chain_but_never_all_tokens() -> None:
    cache = KVCacheManager([FULL], [8], 4)
    assert _hit(cache, 20) == 0
    _computed(cache, 14)
    assert [_hit(cache, n) for n in (20, 13, 12, 5, 4, 1)] == [3, 3, 2, 1, 0, 0]
    assert _hit(cache, 20, salt="other") == 0


def test_nothing_is_cached_without_prefix_caching() -> None:
    cache = KVCacheManager([FULL], [8], 4, enable_prefix_caching=False)
    cache.free(_computed(cache, 14))
    assert cache.counts().cached == 0


def test_sliding_hit_needs_only_the_window_before_it() -> None:
    cache = KVCacheManager([FULL, WINDOW], [10, 10], 4)
    blocks = _computed(cache, 24)
    # Computing from 20 on sees 15 and later; blocks 0, 1 and 2 were let go on the way and stay cached.
    full, window = blocks.tables
    assert (full.first, full.end, window.first, window.end) == (0, 6, 3, 6)
    held = list(window.ids)
    cache.free(blocks)
    # Four free blocks, then the oldest cached ones: 0, 1 and 2.
    others = cache.pools[1].take(4 + 3)
    again = cache.new_blocks("")
    assert cache.find_prefix(again, TOKENS[:30]) == 6
    cache.pools[1].release(others)
    assert cache.admit(again, 6, 30, 30, 0.0)
    # A token at 24 sees 19 and later.
    assert (again.tables[0].first, again.tables[0].end) == (0, 8)
    assert (again.tables[1].first, again.tables[1].ids) == (4, held[1:])


def test_sliding_hit_falls_back_to_an_earlier_whole_window() -> None:
    cache = KVCacheManager([FULL, WINDOW], [10, 10], 4)
    cache.free(_computed(cache, 24))
    # Least recently used first: 0, 1, 2 (left the window), then 5, 4, 3 (returned from the end).
    cache.pools[1].take(4 + 4)
    assert _hit(cache, 30) == 5
    cache.pools[1].take(1)
    assert _hit(cache, 30) == 0


def test_window_of_one_token_needs_no_block_before_it() -> None:
    cache = KVCacheManager([CacheGroup(LayerKind.SLIDING, (0,), 1)], [4], 4)
    blocks = _computed(cache, 12)
    assert (blocks.tables[0].first, blocks.tables[0].end) == (2, 3)
    assert _hit(cache, 13) == 3


def test_growth_takes_blocks_only_at_the_quiet_end_and_lets_the_window_go() -> None:
    cache = KVCacheManager([FULL, WINDOW], [16, 16], 4)
    blocks = _computed(cache, 8, chunk=8)
    looked = 0
    for start in range(8, 40):
        if start + 1 > blocks.quiet_end:
            looked += 1
            assert cache.grow(blocks, start, start + 1) == start + 1
        full, window = blocks.tables
        assert full.end == window.end == start // 4 + 1
        assert window.first == max(0, start - 5) // 4
    # Once for a new block and once for the window's end, in every four tokens.
    assert looked <= 17
    assert cache.pools[1].counts().in_use <= WINDOW.max_blocks(40, 1, 4)


def test_growth_reaches_as_far_as_blocks_do() -> None:
    cache = KVCacheManager([WINDOW], [3], 4)
    blocks = cache.new_blocks("")
    assert cache.admit(blocks, 0, 30, 1, 0.0)
    assert cache.grow(blocks, 0, 30) == 12
    # Computing from 12 on needs positions 7..: block 0 is let go and used again.
    assert cache.grow(blocks, 12, 30) == 16
    other = cache.new_blocks("")
    assert cache.grow(other, 0, 4) == 0
    cache.free(blocks)
    assert cache.grow(other, 0, 4) == 4


def test_admission_reserves_all_known_tokens_in_full_groups_and_leaves_the_spare() -> None:
    cache = KVCacheManager([FULL], [10], 4)
    blocks = cache.new_blocks("")
    assert not cache.admit(blocks, 0, 38, 4, 0.1)
    assert cache.counts().free == 10 and blocks.tables[0].ids == []
    assert cache.admit(blocks, 0, 36, 4, 0.1)
    assert cache.counts().in_use == 9


def test_admission_counts_cached_blocks_it_is_about_to_use() -> None:
    cache = KVCacheManager([FULL], [4], 4)
    cache.free(_computed(cache, 16))
    blocks = cache.new_blocks("")
    hit = cache.find_prefix(blocks, TOKENS[:20])
    # 4 cached blocks are found and 1 more is needed: available are 4, all of them the found ones.
    assert hit == 4
    assert not cache.admit(blocks, hit, 20, 20, 0.0)
    assert cache.counts().cached == 4


def test_registration_waits_for_known_tokens_and_tells_of_the_full_group() -> None:
    cache = KVCacheManager([WINDOW, FULL], [8, 8], 4)
    blocks = cache.new_blocks("")
    assert cache.admit(blocks, 0, 7, 7, 0.0)
    assert cache.grow(blocks, 0, 8) == 8
    cache.register(blocks, TOKENS[:7], 8)
    assert cache.take_events() == [BlockStored(blocks.hashes[0], blocks.root)]
    assert blocks.register_at == 8
    cache.register(blocks, TOKENS[:8], 7)
    assert cache.take_events() == []
    cache.register(blocks, TOKENS[:8], 8)
    assert cache.take_events() == [BlockStored(blocks.hashes[1], blocks.hashes[0])]
    assert blocks.register_at == 12


def test_new_entries_are_told_once_and_start_where_a_window_starts() -> None:
    cache = KVCacheManager([FULL, WINDOW], [10, 10], 4)
    _computed(cache, 24)
    blocks = cache.new_blocks("")
    assert cache.admit(blocks, cache.find_prefix(blocks, TOKENS[:30]), 30, 30, 0.0)
    cache.grow(blocks, 24, 30)
    full, window = blocks.tables
    assert blocks.take_new() == [NewEntries(0, 0, full.ids), NewEntries(1, 4, window.ids)]
    assert blocks.take_new() == []
    cache.grow(blocks, 30, 33)
    assert blocks.take_new() == [NewEntries(0, 8, full.ids[8:]), NewEntries(1, 8, window.ids[-1:])]


def test_shortage_names_what_is_missing() -> None:
    cache = KVCacheManager([FULL, WINDOW], [10, 2], 4)
    assert "3 blocks of 4 tokens in the sliding layers and there are 2" in cache.shortage(12)
    cache = KVCacheManager([FULL, WINDOW], [10, 3], 4)
    assert cache.shortage(40) == ""
    assert "41 tokens need 11 blocks" in cache.shortage(41)
