"""The key of a random draw: a pure function of a request's seed and the position of the token drawn.

So a request draws the same tokens at any batch size, chunking or cache state, and goes on exactly after it has moved to
another replica. Torch-free. Called by the worker, which uploads the keys of a step as `SamplingTensors.key_S2`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
_HALF_BITS = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
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
    words = draw_key_of_mixed(mix_seed(np.atleast_1d(seed)), np.atleast_1d(position))
    return words.reshape(*np.broadcast_shapes(np.shape(seed), np.shape(position)), 2)


def mix_seed(seed: NDArray[np.int64]) -> NDArray[np.uint64]:
    """mix(seed): what of `draw_key` stays the same over the steps of a request."""
    return _mix(np.asarray(seed, np.uint64))


def draw_key_of_mixed(mixed_seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.int64]:
    """`draw_key` from what `mix_seed` gave; half the work."""
    word = _mix(mixed_seed + (position.astype(np.uint64) + _ONE) * _GOLDEN)
    key = np.empty((*word.shape, 2), np.int64)
    key[..., 0] = word & _LOW_HALF
    key[..., 1] = word >> _HALF_BITS
    return key


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = (word ^ (word >> _SHIFTS[0])) * _MULTIPLIER_1
    word = (word ^ (word >> _SHIFTS[1])) * _MULTIPLIER_2
    return word ^ (word >> _SHIFTS[2])
