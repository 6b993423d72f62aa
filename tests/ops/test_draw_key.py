"""Draw keys: as documented, for scalars and arrays alike."""

from __future__ import annotations

import numpy as np

from sonar.ops.draw_key import draw_key

_WORD = 2**64


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % _WORD
    return word ^ (word >> 31)


def _expected(seed: int, position: int) -> list[int]:
    word = _mix((_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) % _WORD)
    return [word % 2**32, word >> 32]


def test_equals_the_documented_formula() -> None:
    for seed in (0, 1, 12345, 2**63 - 1):
        for position in (0, 1, 131_071, 2**31):
            key = draw_key(seed, position)
            assert key.dtype == np.int64 and key.tolist() == _expected(seed, position)


def test_splitmix64_of_zero_is_the_published_stream() -> None:
    # The mix of 0 is 0, so that seed 0 gives splitmix64's own first output for seed 0.
    key0, key1 = draw_key(0, 0).tolist()
    assert key1 << 32 | key0 == 0xE220A8397B1DCDAF


def test_arrays_broadcast() -> None:
    seeds, positions = np.array([3, 2**62]), np.array([[5], [6], [7]])
    keys = draw_key(seeds, positions)
    assert keys.shape == (3, 2, 2)
    assert keys[2, 1].tolist() == _expected(2**62, 7)
    assert draw_key(seeds, 5).tolist() == keys[0].tolist()
    assert draw_key(np.empty(0, np.int64), np.empty(0, np.int64)).shape == (0, 2)
