"""Which layers each pipeline stage computes: contiguous ranges, balanced by bytes. Pure and torch-free.

Bytes stand for time: a decode step reads every weight once, but of the embedding a few rows alone. So the first stage
is given nothing for the embedding that it holds, the last one the whole head. Called by the loader and by tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sonar.config import ModelConfig, ParallelConfig
from sonar.errors import ConfigError

_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.")
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")


class StageSizes(NamedTuple):
    """Bytes that a step reads of each layer, and of what the first and the last stage hold beside."""

    layers: list[int]
    first: int
    last: int


def measure_stages(config: ModelConfig, stored: Mapping[str, int]) -> StageSizes:
    """From the bytes of the checkpoint's tensors by name; with none, layers and tables in the proportion of a dense
    decoder's elements."""
    if not stored:
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        layer = config.hidden_size * (heads + 3 * config.intermediate_size)
        return StageSizes([layer] * config.num_layers, 0, config.hidden_size * config.vocab_size)
    layers = [0] * config.num_layers
    for name, size in stored.items():
        found = _LAYER.match(name)
        if found and int(found[1]) < config.num_layers:
            layers[int(found[1])] += size
    embedding = sum(stored.get(name, 0) for name in _EMBEDDINGS)
    head = embedding if config.tie_word_embeddings else stored.get("lm_head.weight", embedding)
    return StageSizes(layers, 0, head)


def plan_stages(
    config: ModelConfig, parallel: ParallelConfig, layer_bytes: Sequence[int], first_bytes: int, last_bytes: int
) -> tuple[tuple[int, int], ...]:
    """(first layer, layer after the last) of every stage; the heaviest stage is as light as it can be.

    Args:
        layer_bytes: weights of each layer. first_bytes, last_bytes: what the first and the last stage hold beside.

    Raises:
        ConfigError: more stages than layers, or `pp_layers` that do not add up to the layers.
    """
    num_layers, num_stages = config.num_layers, parallel.pp_size
    assert len(layer_bytes) == num_layers, f"{len(layer_bytes)} sizes for {num_layers} layers"
    if num_stages > num_layers:
        raise ConfigError(f"pp_size={num_stages} for {num_layers} layers; choose at most {num_layers}", param="pp_size")
    if parallel.pp_layers:
        return _given_stages(num_layers, parallel.pp_layers)
    limit = _lightest_limit(num_stages, layer_bytes, first_bytes, last_bytes)
    ends = _fill(num_stages, layer_bytes, first_bytes, last_bytes, limit)
    assert ends is not None, f"no stages of {limit} bytes"
    return tuple(zip([0, *ends[:-1]], ends))


def _given_stages(num_layers: int, pp_layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    if sum(pp_layers) != num_layers:
        raise ConfigError(
            f"pp_layers={list(pp_layers)} gives out {sum(pp_layers)} of {num_layers} layers; make the sum equal",
            param="pp_layers",
        )
    ends = [sum(pp_layers[: stage + 1]) for stage in range(len(pp_layers))]
    return tuple(zip([0, *ends[:-1]], ends))


def _lightest_limit(num_stages: int, layer_bytes: Sequence[int], first_bytes: int, last_bytes: int) -> int:
    """The least bytes a stage within which the layers fit; found by halving, for room only helps."""
    low, high = 0, sum(layer_bytes) + first_bytes + last_bytes
    while low < high:
        middle = (low + high) // 2
        if _fill(num_stages, layer_bytes, first_bytes, last_bytes, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _fill(
    num_stages: int, layer_bytes: Sequence[int], first_bytes: int, last_bytes: int, limit: int
) -> list[int] | None:
    """Ends of stages of at most `limit` bytes, each filled before the next and none empty; None if they do not fit."""
    ends: list[int] = []
    layer, num_layers = 0, len(layer_bytes)
    for stage in range(num_stages):
        held = (first_bytes if stage == 0 else 0) + (last_bytes if stage == num_stages - 1 else 0)
        most = num_layers - (num_stages - 1 - stage)  # every later stage needs a layer
        start = layer
        while layer < most and held + layer_bytes[layer] <= limit:
            held += layer_bytes[layer]
            layer += 1
        if layer == start or held > limit:
            return None
        ends.append(layer)
    return ends if layer == num_layers else None
