"""Causal attention of several query tokens a request over its cached tokens, as one Triton kernel.

A program takes a run of queries of one request and one query head, and passes over the keys it may see (Dao 2023,
FlashAttention-2): first the tiles that all its queries see whole, then those at the diagonal or a window's edge. Long
runs are launched first, which evens out the causal triangle. Called by `sonar.ops.cuda_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonar.ops.cuda_decode_attention import apply_softcap
from sonar.ops.cuda_launch import ceil_div, power_of_two
from sonar.ops.table import AttentionMetadata, AttentionSpec

_SHORT = 1024


@triton.jit
def _pass_over(
    q,
    acc,
    best,
    total,
    begin,
    end,
    query_positions,
    first_position,
    seq_len,
    table_row,
    head_ptr,
    kv_stride,
    block_stride,
    token_stride,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes the tiles begin to end - 1 into the running softmax. IS_MASKED: some query may not see some key of them."""
    dims = tl.arange(0, DIMS)
    for tile in range(begin, end):
        positions = tile * TILE + tl.arange(0, TILE)
        if IS_MASKED:
            exists = positions < seq_len
            if WINDOW > 0:
                exists = exists & (positions > first_position - WINDOW)
            block = tl.load(table_row + positions // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        else:
            block = tl.load(table_row + positions // BLOCK_SIZE).to(tl.int64)
        place = block * block_stride + (positions % BLOCK_SIZE) * token_stride
        kv_ptr = head_ptr + place[:, None] + dims[None, :]
        if IS_MASKED:
            kv_mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(kv_ptr, mask=kv_mask, other=0.0)
            v = tl.load(kv_ptr + kv_stride, mask=kv_mask, other=0.0)
        elif HEAD_DIM != DIMS:
            k = tl.load(kv_ptr, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(kv_ptr + kv_stride, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(kv_ptr)
            v = tl.load(kv_ptr + kv_stride)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_SOFTCAP:
            scores = apply_softcap(scores * scale, softcap) * 1.4426950408889634
        else:
            scores = scores * (scale * 1.4426950408889634)
        if IS_MASKED:
            distance = query_positions[:, None] - positions[None, :]
            seen = distance >= 0
            if WINDOW > 0:
                seen = seen & (distance < WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        base = new_best
        if IS_MASKED:
            # A row that has seen nothing yet keeps -inf, whose difference to itself is no number.
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        best = new_best
    return acc, best, total


# What differs from step to step is not compiled for.
@triton.jit(do_not_specialize=["first_request", "table_stride"])
def _prefill_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    scale,
    softcap,
    first_request,
    table_stride,
    block_stride,
    kv_stride,
    head_stride,
    token_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    request = first_request + tl.program_id(2)
    query_start = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - query_start
    run = tl.cdiv(num_queries, ROWS) - 1 - tl.program_id(1)
    if run < 0:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    rows = run * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    row_mask = (rows < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    places = (query_start + rows).to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + places, mask=row_mask, other=0.0)
    first_position = seq_len - num_queries + run * ROWS
    # Rows beyond the last query see what the last one sees; they are not stored.
    positions = tl.minimum(first_position + tl.arange(0, ROWS), seq_len - 1)
    last_position = tl.minimum(first_position + ROWS - 1, seq_len - 1)

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        best = tl.zeros((ROWS,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    table_row = table_ptr + request.to(tl.int64) * table_stride
    head_ptr = cache_ptr + (head // GROUP) * head_stride
    end = last_position // TILE + 1
    if WINDOW > 0:
        middle = tl.maximum(first_position - WINDOW + 1, 0) // TILE
    else:
        middle = (first_position + 1) // TILE
        acc, best, total = _pass_over(
            q, acc, best, total, 0, middle, positions, first_position, seq_len, table_row, head_ptr, kv_stride,
            block_stride, token_stride, scale, softcap,
            HEAD_DIM, DIMS, BLOCK_SIZE, TILE, WINDOW, HAS_SOFTCAP, False, PRECISION,
        )  # fmt: skip
    acc, best, total = _pass_over(
        q, acc, best, total, middle, end, positions, first_position, seq_len, table_row, head_ptr, kv_stride,
        block_stride, token_stride, scale, softcap,
        HEAD_DIM, DIMS, BLOCK_SIZE, TILE, WINDOW, HAS_SOFTCAP, True, PRECISION,
    )  # fmt: skip
    tl.store(out_ptr + places, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=row_mask)


class PrefillAttention:
    """Attention of requests with several query tokens.

    Args:
        rows, tile: queries and keys a program holds at a time. num_warps, num_stages: Triton's.
    """

    def __init__(self, *, rows: int = 128, tile: int = 64, num_warps: int = 4, num_stages: int = 3) -> None:
        self._rows, self._tile = rows, tile
        self._num_warps, self._num_stages = num_warps, num_stages

    def __call__(
        self,
        q_THE: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks_H: Tensor | None,
        out_THE: Tensor,
    ) -> None:
        """Attends with the rows of the requests behind the decodes, and writes those rows of out."""
        first = metadata.num_decodes
        num_requests = metadata.seq_lens_R.shape[0] - first
        dims, tile = power_of_two(spec.head_dim, 16), self._tile
        # Three sizes, not more: each is a kernel of its own. For prompts of 512, 64 rows gave 203 TFLOP/s and 128 179.
        rows = 16 if metadata.max_query_len <= 16 else 64 if metadata.max_seq_len <= _SHORT else self._rows
        if q_THE.dtype == torch.float32 or dims > 128:
            rows, tile = min(rows, 64), 32
        _prefill_kernel[(spec.num_heads, ceil_div(metadata.max_query_len, rows), num_requests)](
            q_THE,
            kv_cache,
            out_THE,
            metadata.block_table_RB,
            metadata.query_start_R1,
            metadata.seq_lens_R,
            q_THE if sinks_H is None else sinks_H,
            spec.scale,
            spec.softcap,
            first,
            metadata.block_table_RB.stride(0),
            *kv_cache.stride()[:4],
            NUM_HEADS=spec.num_heads,
            GROUP=spec.num_heads // spec.num_kv_heads,
            HEAD_DIM=spec.head_dim,
            DIMS=dims,
            BLOCK_SIZE=kv_cache.shape[3],
            ROWS=rows,
            TILE=tile,
            WINDOW=spec.window,
            HAS_SOFTCAP=spec.softcap != 0.0,
            HAS_SINKS=sinks_H is not None,
            PRECISION="ieee" if q_THE.dtype == torch.float32 else "tf32",
            num_warps=self._num_warps if rows >= 64 else 4,
            num_stages=self._num_stages,
        )
