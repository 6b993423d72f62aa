"""Rotary position tables: plain, linear, llama3 and yarn frequencies, computed once a layer kind and shared.

Called by the models at load. Knows nothing of config files: the numbers come in `RopeConfig.parameters` under the names
of Hugging Face's `rope_parameters`. Frequencies and angles are float32 products, as `transformers` computes them:
models were trained on those roundings, which at position 100,000 are a few thousandths of a radian.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sonar.config import RopeConfig
from sonar.errors import ModelError


def build_cos_sin(
    rope: RopeConfig, max_position: int, device: torch.device, frequency_factors_X: Tensor | None = None
) -> Tensor:
    """The table that `RopeKVWriteFn` reads.

    Args:
        max_position: positions 0 .. max_position - 1 get a row.
        frequency_factors_X: (dim / 2,), divides the frequencies; how GGUF files state llama3's scaling. None: no such.

    Returns:
        float32 (max_position, rope.dim): cosines, then sines, times yarn's attention factor.

    Raises:
        ModelError: a parameter of the scaling is missing.
    """
    inv_freq_X = inverse_frequencies(rope).to(device)
    if frequency_factors_X is not None:
        inv_freq_X = inv_freq_X / frequency_factors_X.to(device, torch.float32)
    angles_PX = torch.outer(torch.arange(max_position, dtype=torch.float32, device=device), inv_freq_X)
    table_PR = torch.empty(max_position, rope.dim, dtype=torch.float32, device=device)
    half = rope.dim // 2
    torch.cos(angles_PX, out=table_PR[:, :half])
    torch.sin(angles_PX, out=table_PR[:, half:])
    factor = attention_factor(rope)
    return table_PR if factor == 1.0 else table_PR.mul_(factor)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians a position of each rotated pair: float32 (rope.dim / 2,), on the CPU. Raises as `build_cos_sin`."""
    powers_X = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).to(torch.float32) / rope.dim)
    match rope.scaling:
        case "none":
            return 1.0 / powers_X
        case "linear":
            return 1.0 / powers_X / _parameter(rope, "factor")
        case "llama3":
            return _llama3(1.0 / powers_X, rope)
        case "yarn":
            return _yarn(powers_X, rope)


def attention_factor(rope: RopeConfig) -> float:
    """What yarn multiplies cosines and sines by, to sharpen attention over the longer context; 1 for the others."""
    if rope.scaling != "yarn":
        return 1.0
    given = rope.parameters.get("attention_factor")
    if given is not None:
        return given
    factor = _parameter(rope, "factor")
    mscale, mscale_all_dim = rope.parameters.get("mscale", 0.0), rope.parameters.get("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def _llama3(inv_freq_X: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long waves are slowed by the factor, short ones kept, those between blended."""
    factor = _parameter(rope, "factor")
    low, high = _parameter(rope, "low_freq_factor"), _parameter(rope, "high_freq_factor")
    context = _parameter(rope, "original_max_position_embeddings")
    wave_len_X = 2 * math.pi / inv_freq_X
    share_X = (context / wave_len_X - low) / (high - low)
    blended_X = (1 - share_X) * inv_freq_X / factor + share_X * inv_freq_X
    result_X = torch.where(wave_len_X > context / low, inv_freq_X / factor, blended_X)
    return torch.where(wave_len_X < context / high, inv_freq_X, result_X)


def _yarn(powers_X: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): a ramp over the pairs between kept and interpolated frequencies."""
    factor = _parameter(rope, "factor")
    context = _parameter(rope, "original_max_position_embeddings")
    low = _yarn_pair(rope, context, _or_default(rope.parameters, "beta_fast", 32.0))
    high = _yarn_pair(rope, context, _or_default(rope.parameters, "beta_slow", 1.0))
    if rope.parameters.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    interpolated_X = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept_X = 1 - interpolated_X
    return 1.0 / (factor * powers_X) * (1 - kept_X) + 1.0 / powers_X * kept_X


def _yarn_pair(rope: RopeConfig, context: float, rotations: float) -> float:
    """The (fractional) pair whose frequency turns `rotations` times within the original context."""
    return rope.dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's sharpening for a context `factor` times as long (section 3.4), weighted."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _or_default(parameters: Mapping[str, float], name: str, default: float) -> float:
    """A parameter; files write 0 or leave it out where they mean the default."""
    return parameters.get(name) or default


def _parameter(rope: RopeConfig, name: str) -> float:
    if name not in rope.parameters:
        raise ModelError(
            f"rope scaling {rope.scaling!r} lacks {name!r}; give it in config.json's rope_parameters",
            param="rope_parameters",
        )
    return rope.parameters[name]
