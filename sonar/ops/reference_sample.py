"""Sampling in plain torch: filters and the keyed Gumbel-max draw. Built into its table by `sonar.ops.reference`.

No call here waits for the device: no `.item()`, no boolean-mask indexing. Filters work on the logits sorted once,
typical_p in the order of the ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.ops.table import SamplingTensors

_WORD = 0xFFFFFFFF
_GOLDEN_32 = 0x9E3779B1
# Rows are drawn in runs of at most this many numbers, of which the hash and the logarithms hold several 8-byte copies.
# On a CPU they should stay in its cache (2^22 took twice as long a row); elsewhere each run costs launches.
_MAX_DRAWN_CPU = 1 << 17
_MAX_DRAWN = 1 << 24


def sample(logits_SV: Tensor, sampling: SamplingTensors) -> Tensor:
    """See `sonar.ops.table.SampleFn`."""
    greedy_S = logits_SV.argmax(dim=-1)
    if sampling.all_greedy:
        return greedy_S
    scaled_SV = scale_and_filter(logits_SV, sampling)
    return torch.where(sampling.temperature_S == 0, greedy_S, _draw(scaled_SV, sampling.key_S2))


def scale_and_filter(logits_SV: Tensor, sampling: SamplingTensors) -> Tensor:
    """Logits divided by the temperature, -inf where a filter drops a token; a greedy row keeps its likeliest token.

    Args:
        logits_SV: overwritten.
    """
    divisor_S1 = sampling.temperature_S.masked_fill(sampling.temperature_S == 0, 1.0).unsqueeze(1)
    scaled_SV = logits_SV.div_(divisor_S1)
    return _filter(scaled_SV, sampling) if sampling.any_filter else scaled_SV


def gumbel_noise(key_S2: Tensor, num_tokens: int) -> Tensor:
    """g of `SampleFn`'s formula for every token id: (S, num_tokens) float32, computed in float64.

    64-bit products wrap, which leaves their low 32 bits right.
    """
    key0_S1, key1_S1 = key_S2.unsqueeze(-1).unbind(1)
    token_V = torch.arange(num_tokens, dtype=torch.int64, device=key_S2.device)
    hash_SV = _fmix32((token_V * _GOLDEN_32 + key0_S1) & _WORD)
    hash_SV = _fmix32(hash_SV ^ key1_S1)
    u_SV = ((hash_SV >> 8).to(torch.float64) + 0.5) * 2.0**-24
    return u_SV.log_().neg_().log_().neg_().to(torch.float32)


def _fmix32(word: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 on 32-bit words held in int64."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B & _WORD
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & _WORD
    return word ^ (word >> 16)


def _draw(scaled_SV: Tensor, key_S2: Tensor) -> Tensor:
    """argmax of logits plus noise; a row of -inf alone gives id 0."""
    step = max(1, (_MAX_DRAWN_CPU if scaled_SV.device.type == "cpu" else _MAX_DRAWN) // scaled_SV.shape[1])
    drawn = [
        (rows_SV + gumbel_noise(keys_S2, scaled_SV.shape[1])).argmax(dim=-1)
        for rows_SV, keys_S2 in zip(torch.split(scaled_SV, step), torch.split(key_S2, step), strict=True)
    ]
    return torch.cat(drawn)


def _filter(scaled_SV: Tensor, sampling: SamplingTensors) -> Tensor:
    """Sets what the filters drop to -inf. In sorted order, X is the rank; equal values keep the order of their ids."""
    sorted_SX, ids_SX = scaled_SV.sort(dim=-1, descending=True, stable=True)
    rank_X = torch.arange(sorted_SX.shape[1], device=sorted_SX.device)
    top_k_S1 = sampling.top_k_S.unsqueeze(1)
    keep_SX = (rank_X < top_k_S1) | (top_k_S1 <= 0)
    keep_SX &= (sorted_SX - sorted_SX[:, :1]).exp() >= sampling.min_p_S.unsqueeze(1)
    keep_SX[:, 0] = True
    is_typical_S1 = (sampling.typical_p_S < 1).unsqueeze(1)
    if _may_hold(is_typical_S1):
        kept_SV = torch.zeros_like(keep_SX).scatter_(1, ids_SX, keep_SX)
        kept_SV = torch.where(is_typical_S1, _typical(scaled_SV, kept_SV, sampling.typical_p_S), kept_SV)
        keep_SX = kept_SV.gather(1, ids_SX)
    is_nucleus_S1 = (sampling.top_p_S < 1).unsqueeze(1)
    p_SX = _renormalized(sorted_SX, keep_SX)
    keep_SX &= (_mass_before(p_SX) < sampling.top_p_S.unsqueeze(1)) | ~is_nucleus_S1
    sorted_SX = sorted_SX.masked_fill_(~keep_SX, float("-inf"))
    return scaled_SV.scatter_(1, ids_SX, sorted_SX)


def _typical(scaled_SV: Tensor, kept_SV: Tensor, typical_p_S: Tensor) -> Tensor:
    """The smallest set of kept tokens of mass >= typical_p whose surprise lies closest to the entropy (Meister et al.
    2022, locally typical sampling)."""
    p_SV = _renormalized(scaled_SV, kept_SV)
    entropy_S1 = torch.special.entr(p_SV).sum(dim=-1, keepdim=True)
    distance_SV = (-p_SV.log() - entropy_S1).abs()
    order_SX = distance_SV.sort(dim=-1, stable=True).indices
    mass_SX = _mass_before(p_SV.gather(1, order_SX))
    near_SX = mass_SX < typical_p_S.unsqueeze(1)
    return kept_SV & torch.zeros_like(kept_SV).scatter_(1, order_SX, near_SX)


def _renormalized(values: Tensor, keep: Tensor) -> Tensor:
    """Probabilities of the kept tokens; 0 for the others."""
    return values.masked_fill(~keep, float("-inf")).softmax(dim=-1)


def _mass_before(p_SX: Tensor) -> Tensor:
    """Sum of the probabilities at smaller ranks, in float64: over 100,000 tokens a float32 sum drifts."""
    p_SX = p_SX.to(torch.float64)
    return p_SX.cumsum(dim=-1).sub_(p_SX)


def _may_hold(condition: Tensor) -> bool:
    """Whether any entry is true; assumed where looking would wait for a device."""
    return condition.device.type != "cpu" or bool(condition.any())
