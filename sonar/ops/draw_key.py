"""The key of a random draw: a pure function of a request's seed and the position of the token drawn.

So a request draws the same tokens at any batch size, chunking or cache state, and goes on exactly after it has moved to
another replica. Torch-free. Called by the worker, which uploads the keys of a step as `SamplingTensors.key_S2`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def draw_key(seed: int | NDArray[np.int64], position: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Two unsigned 32-bit words for each draw.

    With mix the finalizer of splitmix64 (Steele, Lea, Flood 2014) and all integers modulo 2^64:
        word = mix(mix(seed) + (position + 1) * 0x9E3779B97F4A7C15);  key0 = word mod 2^32;  key1 = word >> 32
        mix(z): z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    The seed is mixed before the position enters, or seeds that lie a multiple of the increment apart would draw shifted
    copies of one stream.

    Args:
        seed: in [0, 2^63). position: of the token drawn, counted from the first prompt token. Scalars or arrays that
            broadcast together.

    Returns:
        int64 of the broadcast shape + (2,): key0, key1.
    """
    seed_words, positions = np.atleast_1d(np.asarray(seed, np.uint64)), np.atleast_1d(np.asarray(position, np.uint64))
    word = _mix(_mix(seed_words) + (positions + np.uint64(1)) * _GOLDEN)
    halves = np.stack([word & np.uint64(0xFFFFFFFF), word >> np.uint64(32)], axis=-1).astype(np.int64)
    return halves.reshape(*np.broadcast_shapes(np.shape(seed), np.shape(position)), 2)


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = (word ^ (word >> np.uint64(30))) * _MULTIPLIER_1
    word = (word ^ (word >> np.uint64(27))) * _MULTIPLIER_2
    return word ^ (word >> np.uint64(31))
