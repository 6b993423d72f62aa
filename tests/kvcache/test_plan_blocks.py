"""Cache groups of a model, and how memory is shared out among them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonar.config import LayerKind, ModelConfig
from sonar.errors import CapacityError
from sonar.kvcache.groups import CacheGroup, cache_groups
from sonar.kvcache.plan import longest_that_fits, plan_blocks

F, S = LayerKind.FULL, LayerKind.SLIDING


def _model(kinds: tuple[LayerKind, ...]) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=100,
        hidden_size=8,
        intermediate_size=8,
        num_layers=len(kinds),
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=128,
        norm_eps=1e-5,
        activation="silu",
        layer_kinds=kinds,
        rope={},
        sliding_window=32 if S in kinds else 0,
    )


def test_one_group_a_layer_kind_in_order_of_appearance() -> None:
    assert cache_groups(_model((F, F))) == (CacheGroup(F, (0, 1)),)
    assert cache_groups(_model((S, S, F, S))) == (CacheGroup(S, (0, 1, 3), 32), CacheGroup(F, (2,)))
    assert cache_groups(_model((S, S))) == (CacheGroup(S, (0, 1), 32),)


@given(st.integers(1, 20), st.integers(1, 50), st.integers(0, 200), st.sampled_from([1, 4, 16]))
def test_max_blocks_is_what_the_worst_position_needs(window: int, chunk: int, tail: int, size: int) -> None:
    group = CacheGroup(S, (0,), window)
    num_tokens = chunk + tail
    held = [(start + chunk - 1) // size + 1 - group.first_block(start, size) for start in range(num_tokens - chunk + 1)]
    assert max(held) <= group.max_blocks(num_tokens, chunk, size) <= max(held) + 1


@given(st.integers(1, 9), st.integers(0, 60), st.sampled_from([1, 4, 16]))
def test_first_block_is_the_block_of_the_oldest_token_seen(window: int, position: int, size: int) -> None:
    seen = range(max(0, position - window + 1), position + 1)
    assert CacheGroup(S, (0,), window).first_block(position, size) == seen[0] // size
    assert CacheGroup(F, (0,)).first_block(position, size) == 0


def test_one_group_takes_all_memory() -> None:
    assert plan_blocks(1000, [CacheGroup(F, (0, 1))], 2, 8, 64, 16) == (1000 // (2 * 2 * 8),)


def test_too_little_memory_says_what_is_needed_there_and_possible() -> None:
    group = CacheGroup(F, (0, 1))
    needed = 2 * 2 * 8 * (64 // 8)
    assert plan_blocks(needed, [group], 2, 8, 64, 16) == (8,)
    with pytest.raises(CapacityError) as caught:
        plan_blocks(needed - 1, [group], 2, 8, 64, 16)
    text = str(caught.value)
    assert f"needs {needed} bytes" in text and f"there are {needed - 1}" in text and "max_model_len=64" in text
    fits = re.search(r"lower --max-model-len to (\d+)", text)
    assert fits is not None and int(fits[1]) == 56
    assert plan_blocks(needed - 1, [group], 2, 8, int(fits[1]), 16) == (7,)
    with pytest.raises(CapacityError, match="; raise --kv-cache-memory"):
        plan_blocks(31, [group], 2, 8, 64, 16)


@given(
    memory=st.integers(0, 10**9),
    full_layers=st.integers(0, 8),
    sliding_layers=st.integers(0, 30),
    window=st.integers(1, 5000),
    size=st.sampled_from([8, 16, 128]),
    length=st.integers(1, 20_000),
    chunk=st.integers(1, 4096),
)
def test_a_plan_fits_memory_and_one_longest_request(
    memory: int, full_layers: int, sliding_layers: int, window: int, size: int, length: int, chunk: int
) -> None:
    groups = []
    if sliding_layers or not full_layers:
        groups.append(CacheGroup(S, tuple(range(sliding_layers or 1)), window))
    if full_layers:
        groups.append(CacheGroup(F, tuple(range(full_layers))))
    block_bytes = [len(group.layers) * 512 * size for group in groups]
    try:
        blocks = plan_blocks(memory, groups, 512, size, length, chunk)
    except CapacityError:
        least = [group.max_blocks(length, min(chunk, length), size) for group in groups]
        assert sum(a * b for a, b in zip(least, block_bytes)) > memory
        return
    used = sum(a * b for a, b in zip(blocks, block_bytes))
    assert used <= memory < used + block_bytes[0]
    for group, count in zip(groups, blocks):
        assert count >= group.max_blocks(length, min(chunk, length), size)


@given(st.integers(0, 30_000), st.integers(1, 40), st.integers(1, 64))
def test_longest_that_fits_fits_and_one_more_does_not(memory: int, window: int, chunk: int) -> None:
    groups = [CacheGroup(S, (0, 1), window), CacheGroup(F, (2,))]
    longest = longest_that_fits(memory, groups, 2, 8, 300, chunk)
    assert 0 <= longest <= 300
    if longest:
        plan_blocks(memory, groups, 2, 8, longest, chunk)
    if longest < 300:
        with pytest.raises(CapacityError):
            plan_blocks(memory, groups, 2, 8, longest + 1, chunk)


def test_sliding_groups_get_less_per_layer_than_full_ones() -> None:
    groups = [CacheGroup(S, (0, 1, 2, 3, 4), 512), CacheGroup(F, (5,))]
    sliding_blocks, full_blocks = plan_blocks(10**9, groups, 1024, 16, 8192, 2048)
    # Each typical request of 2,048 tokens holds 128 full blocks and some 33 of the window.
    assert 2.5 < full_blocks / sliding_blocks < 4
