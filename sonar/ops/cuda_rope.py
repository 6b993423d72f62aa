"""QK-norm, rotation and cache write as one Triton kernel; steps of decodes alone have them within their attention
(`sonar.ops.cuda_decode_attention`).

A program takes one token and a run of heads of one kind: query heads go to the output, key and value heads to their
place in the cache. A token of a negative slot is written nowhere (padding of captured decode graphs). Rounds where the
reference rounds. Built into its table by `sonar.ops.cuda`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonar.ops.cuda_launch import ceil_div, power_of_two, wait_for_inputs
from sonar.ops.table import AttentionSpec

_HEADS = 8


@triton.jit
def load_rotated(
    row_ptr,
    mask,
    norm_ptr,
    cos_sin_row_ptr,
    eps,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads of one token, normalized and rotated: (heads, DIMS) in the stored dtype.

    row_ptr: (heads, 1), first number of each head. mask: (heads, DIMS).
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    dims = tl.arange(0, DIMS)
    x = tl.load(row_ptr + dims[None, :], mask=mask, other=0.0)
    is_first = dims < HALF
    is_rotated = dims < ROTARY_DIM
    partner = tl.where(is_first, dims + HALF, tl.where(is_rotated, dims - HALF, dims))
    if ROTARY_DIM > 0:
        other = tl.load(row_ptr + partner[None, :], mask=mask, other=0.0)
    if HAS_NORM:
        x_float = x.to(tl.float32)
        scale = tl.math.rsqrt(tl.sum(x_float * x_float, axis=1) / HEAD_DIM + eps)
        weight = tl.load(norm_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        x = (x_float * scale[:, None] * weight[None, :]).to(x.dtype)
        if ROTARY_DIM > 0:
            its_weight = tl.load(norm_ptr + partner, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
            other = (other.to(tl.float32) * scale[:, None] * its_weight[None, :]).to(x.dtype)
    if ROTARY_DIM > 0:
        pair = tl.where(is_first, dims, dims - HALF)
        cos = tl.load(cos_sin_row_ptr + pair, mask=is_rotated, other=1.0)
        sin = tl.load(cos_sin_row_ptr + HALF + pair, mask=is_rotated, other=0.0)
        sin = tl.where(is_first, -sin, sin)
        x = (x.to(tl.float32) * cos[None, :] + other.to(tl.float32) * sin[None, :]).to(x.dtype)
    return x


@triton.jit
def _rope_kv_write_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cache_ptr,
    slots_ptr,
    out_ptr,
    eps,
    qkv_stride,
    block_stride,
    kv_stride,
    head_stride,
    token_stride,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1)
    Q_RUNS: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    KV_RUNS: tl.constexpr = (NUM_KV + HEADS - 1) // HEADS
    is_q = run < Q_RUNS
    is_v = run >= Q_RUNS + KV_RUNS
    run_in_kind = tl.where(is_q, run, tl.where(is_v, run - Q_RUNS - KV_RUNS, run - Q_RUNS))
    heads = run_in_kind * HEADS + tl.arange(0, HEADS)
    first_head = tl.where(is_q, 0, tl.where(is_v, NUM_Q + NUM_KV, NUM_Q))
    num_heads = tl.where(is_q, NUM_Q, NUM_KV)
    dims = tl.arange(0, DIMS)
    mask = (heads[:, None] < num_heads) & (dims[None, :] < HEAD_DIM)
    wait_for_inputs(PDL)
    row_ptr = qkv_ptr + token * qkv_stride + (first_head + heads)[:, None] * HEAD_DIM
    if is_v:
        x = tl.load(row_ptr + dims[None, :], mask=mask, other=0.0)
    else:
        norm_ptr = q_norm_ptr
        if not is_q:
            norm_ptr = k_norm_ptr
        cos_sin_row_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY_DIM
        x = load_rotated(row_ptr, mask, norm_ptr, cos_sin_row_ptr, eps, HEAD_DIM, DIMS, ROTARY_DIM, HAS_NORM)
    if is_q:
        tl.store(out_ptr + token * (NUM_Q * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :], x, mask=mask)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
            if is_v:
                place += kv_stride
            cache_row = cache_ptr + place + heads[:, None] * head_stride
            tl.store(cache_row + dims[None, :], x.to(cache_ptr.dtype.element_ty), mask=mask)


class RopeKVWrite:
    """`RopeKVWriteFn`. has_pdl: launch dependently (`sonar.ops.cuda_launch`)."""

    def __init__(self, *, has_pdl: bool) -> None:
        self._has_pdl = has_pdl

    def rope_kv_write(
        self,
        qkv_TX: Tensor,
        positions_T: Tensor,
        cos_sin_PR: Tensor | None,
        q_norm_E: Tensor | None,
        k_norm_E: Tensor | None,
        norm_eps: float,
        kv_cache: Tensor,
        slot_mapping_T: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        """See `sonar.ops.table.RopeKVWriteFn`. q_norm_E and k_norm_E are given both or not at all."""
        assert (q_norm_E is None) == (k_norm_E is None), "a norm of Q alone or K alone"
        num_tokens, num_q, num_kv = qkv_TX.shape[0], spec.num_heads, spec.num_kv_heads
        out_THE = torch.empty((num_tokens, num_q, spec.head_dim), dtype=qkv_TX.dtype, device=qkv_TX.device)
        if num_tokens == 0:
            return out_THE
        heads = min(_HEADS, power_of_two(num_kv))
        num_runs = ceil_div(num_q, heads) + 2 * ceil_div(num_kv, heads)
        unused = qkv_TX
        _rope_kv_write_kernel[(num_tokens, num_runs)](
            qkv_TX,
            positions_T,
            unused if cos_sin_PR is None else cos_sin_PR,
            unused if q_norm_E is None else q_norm_E,
            unused if k_norm_E is None else k_norm_E,
            kv_cache,
            slot_mapping_T,
            out_THE,
            norm_eps,
            qkv_TX.stride(0),
            *kv_cache.stride()[:4],
            NUM_Q=num_q,
            NUM_KV=num_kv,
            HEAD_DIM=spec.head_dim,
            ROTARY_DIM=0 if cos_sin_PR is None else cos_sin_PR.shape[1],
            BLOCK_SIZE=kv_cache.shape[3],
            HAS_NORM=q_norm_E is not None,
            HEADS=heads,
            DIMS=power_of_two(spec.head_dim, 16),
            PDL=self._has_pdl,
            num_warps=2 if heads * spec.head_dim >= 512 else 1,
            **({"launch_pdl": True} if self._has_pdl else {}),
        )
        return out_THE
