"""How many blocks each cache group gets out of the memory there is.

A pure function of sizes. Knows nothing of devices or of how the memory was found. Called once at start, by the worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from sonar.errors import CapacityError
from sonar.kvcache.groups import CacheGroup

_TYPICAL_TOKENS = 2048


def plan_blocks(
    memory_bytes: int,
    groups: Sequence[CacheGroup],
    token_bytes: int,
    block_size: int,
    max_model_len: int,
    max_step_tokens: int,
) -> tuple[int, ...]:
    """Blocks of each group; together they take at most `memory_bytes`.

    Every group first gets what one request of `max_model_len` needs. The rest is shared out so that as many requests
    of a typical length as possible fit: a sliding group needs no more than its window for each, a full one everything.

    Args:
        memory_bytes: for all blocks of one rank.
        token_bytes: keys and values of one token in one layer of one rank.
        block_size: tokens a block.
        max_model_len: prompt + output tokens of a request.
        max_step_tokens: the longest chunk of a prompt that is computed at once.

    Raises:
        CapacityError: one request of `max_model_len` does not fit; says what it needs, what there is, what would fit.
    """
    block_bytes = [len(group.layers) * token_bytes * block_size for group in groups]
    least = _blocks_of_one(groups, max_model_len, max_step_tokens, block_size)
    needed = _total(least, block_bytes)
    if needed > memory_bytes:
        fits = longest_that_fits(memory_bytes, groups, token_bytes, block_size, max_model_len, max_step_tokens)
        remedy = f"lower --max-model-len to {fits} or less, or raise" if fits else "raise"
        raise CapacityError(
            f"the KV cache needs {needed} bytes for one request of max_model_len={max_model_len} tokens and there are "
            f"{memory_bytes}; {remedy} --kv-cache-memory (memory_bytes) or --memory-share (memory_share)",
            param="memory_bytes",
        )
    typical = min(max_model_len, max([_TYPICAL_TOKENS, *(2 * group.window for group in groups)]))
    # One token at a time: most of a request's life is decoding.
    weights = _blocks_of_one(groups, typical, 1, block_size)
    rest = memory_bytes - needed
    scale = _total(weights, block_bytes)
    blocks = [few + rest * weight // scale for few, weight in zip(least, weights)]
    unused = memory_bytes - _total(blocks, block_bytes)
    assert unused >= 0, f"planned {blocks} blocks of {block_bytes} bytes in {memory_bytes}"
    blocks[0] += unused // block_bytes[0]
    return tuple(blocks)


def longest_that_fits(
    memory_bytes: int,
    groups: Sequence[CacheGroup],
    token_bytes: int,
    block_size: int,
    max_model_len: int,
    max_step_tokens: int,
) -> int:
    """Tokens of the longest request that fits, at most `max_model_len`; 0 when not even one token does.

    Arguments as in `plan_blocks`. Found by halving: need only grows.
    """
    block_bytes = [len(group.layers) * token_bytes * block_size for group in groups]
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if _total(_blocks_of_one(groups, middle, max_step_tokens, block_size), block_bytes) <= memory_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _blocks_of_one(groups: Sequence[CacheGroup], num_tokens: int, chunk_tokens: int, block_size: int) -> list[int]:
    chunk = min(num_tokens, chunk_tokens)
    return [group.max_blocks(num_tokens, chunk, block_size) for group in groups]


def _total(blocks: Sequence[int], block_bytes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(blocks, block_bytes))
