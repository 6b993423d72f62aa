"""`SampleFn`'s docstring in plain Python numbers, one row at a time: for tests of any backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sonar.ops.draw_key import draw_key
from sonar.ops.table import SamplingTensors

_WORD = 2**32


@dataclass(frozen=True)
class Row:
    """Settings of one row; the defaults are "off"."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    position: int = 0


def to_tensors(rows: list[Row]) -> SamplingTensors:
    """The rows as an op takes them."""

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    filters = any((row.top_k, row.top_p, row.min_p, row.typical_p) != (0, 1.0, 0.0, 1.0) for row in rows)
    return SamplingTensors(
        temperature_S=column("temperature", torch.float32),
        top_k_S=column("top_k", torch.int32),
        top_p_S=column("top_p", torch.float32),
        min_p_S=column("min_p", torch.float32),
        typical_p_S=column("typical_p", torch.float32),
        key_S2=torch.stack([torch.from_numpy(draw_key(row.seed, row.position)) for row in rows]),
        all_greedy=all(row.temperature == 0 for row in rows),
        any_filter=filters,
    )


def draw(logits: list[float], row: Row) -> int:
    """The token that the row draws."""
    if row.temperature == 0:
        return _argmax(dict(enumerate(logits)))
    scaled = [logit / row.temperature for logit in logits]
    key0, key1 = (int(word) for word in draw_key(row.seed, row.position))
    return _argmax({token: scaled[token] + gumbel(token, key0, key1) for token in kept(scaled, row)})


def gumbel(token: int, key0: int, key1: int) -> float:
    """g of the formula."""
    word = fmix32((token * 0x9E3779B1 + key0) % _WORD)
    word = fmix32(word ^ key1)
    return -math.log(-math.log(((word >> 8) + 0.5) * 2.0**-24))


def fmix32(word: int) -> int:
    """The finalizer of MurmurHash3."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B % _WORD
    word = (word ^ (word >> 13)) * 0xC2B2AE35 % _WORD
    return word ^ (word >> 16)


def kept(scaled: list[float], row: Row) -> list[int]:
    """Tokens that the filters leave, from logits already divided by the temperature."""
    tokens = sorted((t for t, value in enumerate(scaled) if value > -math.inf), key=lambda t: (-scaled[t], t))
    if row.top_k > 0:
        tokens = tokens[: row.top_k]
    p = _softmax(scaled, tokens)
    tokens = [t for t in tokens if p[t] >= row.min_p * max(p.values())]
    if row.typical_p < 1:
        p = _softmax(scaled, tokens)
        entropy = -sum(value * math.log(value) for value in p.values())
        by_distance = sorted(tokens, key=lambda t: (abs(-math.log(p[t]) - entropy), t))
        chosen = _smallest_set(by_distance, p, row.typical_p)
        tokens = [t for t in tokens if t in chosen]
    if row.top_p < 1:
        tokens = _smallest_set(tokens, _softmax(scaled, tokens), row.top_p)
    return tokens


def _softmax(scaled: list[float], tokens: list[int]) -> dict[int, float]:
    top = max(scaled[t] for t in tokens)
    weights = {t: math.exp(scaled[t] - top) for t in tokens}
    total = sum(weights.values())
    return {t: weight / total for t, weight in weights.items()}


def _smallest_set(tokens: list[int], p: dict[int, float], mass: float) -> list[int]:
    chosen, total = [], 0.0
    for token in tokens:
        if total >= mass:
            break
        chosen.append(token)
        total += p[token]
    return chosen


def _argmax(values: dict[int, float]) -> int:
    return min(values, key=lambda t: (-values[t], t))
