"""The draw over the vocabulary as two small Triton launches: greedy rows and Gumbel-max rows alike.

A first kernel finds the best token of each stretch of the vocabulary, a second the best of those. Noise is hashed where
it is used, never stored. Filters are the reference's, on the device, before it. Built into its table by
`sonar.ops.cuda`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonar.ops.cuda_launch import ceil_div, power_of_two, wait_for_inputs
from sonar.ops.reference_sample import scale_and_filter
from sonar.ops.table import SamplingTensors

_STRETCH = 4096


@triton.jit
def _mix(word):
    """The finalizer of MurmurHash3 on uint32."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _gumbel(token, key0, key1):
    """g of `SampleFn` in float32, within 1e-6 of its float64 value.

    -ln u is a plain logarithm below 1/2. Above, where a hardware logarithm is wrong in most digits, it is
    2 artanh(r / (2 - r)) of r = 1 - u, which is exact in float32; nine terms leave less than 1e-9. (Float64 logarithms
    of 256 rows of 152k tokens took longer than the decode step they ended.)
    """
    word = _mix(token.to(tl.uint32) * 0x9E3779B1 + key0)
    word = _mix(word ^ key1) >> 8
    u = (word.to(tl.float32) + 0.5) * 5.9604644775390625e-08
    rest = ((16777215 - word).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    s = rest / (2.0 - rest)
    square = s * s
    series = 0.06666667 + square * 0.05882353
    series = 0.07692308 + square * series
    series = 0.09090909 + square * series
    series = 0.11111111 + square * series
    series = 0.14285714 + square * series
    series = 0.2 + square * series
    series = 0.33333334 + square * series
    series = 1.0 + square * series
    surprise = tl.where(word < 8388608, -tl.log(u), 2.0 * s * series)
    return -tl.log(surprise)


@triton.jit
def _stretch_kernel(
    logits_ptr,
    temperature_ptr,
    key_ptr,
    best_ptr,
    best_id_ptr,
    logits_stride,
    vocab_size,
    num_stretches,
    ALL_GREEDY: tl.constexpr,
    IS_SCALED: tl.constexpr,
    STRETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    stretch = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tokens = stretch * STRETCH + tl.arange(0, STRETCH)
    wait_for_inputs(PDL)
    values = tl.load(logits_ptr + row * logits_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    values = values.to(tl.float32)
    if not ALL_GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if temperature != 0:
            key0 = tl.load(key_ptr + row * 2).to(tl.uint32)
            key1 = tl.load(key_ptr + row * 2 + 1).to(tl.uint32)
            if not IS_SCALED:
                values = tl.div_rn(values, temperature + tl.zeros_like(values))
            values += _gumbel(tokens, key0, key1)
    # Lowest id among equal values: tl.max's ties go to the left.
    best, place = tl.max(values, axis=0, return_indices=True)
    tl.store(best_ptr + row * num_stretches + stretch, best)
    tl.store(best_id_ptr + row * num_stretches + stretch, stretch * STRETCH + place)


@triton.jit
def _merge_kernel(best_ptr, best_id_ptr, out_ptr, num_stretches, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    stretches = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    mask = stretches < num_stretches
    values = tl.load(best_ptr + row * num_stretches + stretches, mask=mask, other=float("-inf"))
    _, place = tl.max(values, axis=0, return_indices=True)
    tl.store(out_ptr + row, tl.load(best_id_ptr + row * num_stretches + place).to(tl.int64))


class CudaSample:
    """`SampleFn`. has_pdl: launch dependently (`sonar.ops.cuda_launch`)."""

    def __init__(self, *, has_pdl: bool) -> None:
        self._has_pdl = has_pdl

    def sample(self, logits_SV: Tensor, sampling: SamplingTensors) -> Tensor:
        """See `sonar.ops.table.SampleFn`."""
        is_filtered = sampling.any_filter and not sampling.all_greedy
        if is_filtered:
            logits_SV = scale_and_filter(logits_SV, sampling)
        num_rows, vocab_size = logits_SV.shape
        num_stretches = ceil_div(vocab_size, _STRETCH)
        best = torch.empty((num_rows, num_stretches), dtype=torch.float32, device=logits_SV.device)
        best_ids = torch.empty((num_rows, num_stretches), dtype=torch.int32, device=logits_SV.device)
        out_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
        launch = {"launch_pdl": True} if self._has_pdl else {}
        _stretch_kernel[(num_stretches, num_rows)](
            logits_SV,
            sampling.temperature_S,
            sampling.key_S2,
            best,
            best_ids,
            logits_SV.stride(0),
            vocab_size,
            num_stretches,
            ALL_GREEDY=sampling.all_greedy,
            IS_SCALED=is_filtered,
            STRETCH=_STRETCH,
            PDL=self._has_pdl,
            num_warps=8,
            **launch,
        )
        _merge_kernel[(num_rows,)](
            best, best_ids, out_S, num_stretches,
            BLOCK=power_of_two(num_stretches, 16), PDL=self._has_pdl, num_warps=1, **launch,
        )  # fmt: skip
        return out_S
