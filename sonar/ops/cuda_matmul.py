"""Matrix products of 1 to 16 rows as Triton kernels that read the weights once, at memory bandwidth.

Optionally fused: RMSNorm of the input before, the residual's addition or a gated activation after. The norm's scale is
a factor of the whole row, so it is applied to the sum: the row is normalized without being read twice. Weights are
loaded before the wait for the kernel before (`sonar.ops.cuda_launch`), so that their latency overlaps its end. One row
is multiplied without tensor cores, several with them. Called by `sonar.ops.cuda_linear`.

Legend beyond `sonar.ops.table`: M rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sonar.ops.cuda_activation import activate
from sonar.ops.cuda_launch import wait_for_inputs


@triton.jit
def one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out (N,) = x (K,) W^T; GATED: W has 2 N rows, out = activation(first N) * last N (KIND GATED - 1)."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    row_mask = rows < N
    row_ptr = weight_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    mask = row_mask[:, None] & (columns < K)[None, :]
    # The first tile is on its way before the wait; most matrices of small models are one or two tiles deep.
    weight = tl.load(row_ptr, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED > 0:
        up_ptr = row_ptr + N * K
        up_weight = tl.load(up_ptr, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
    squares = x * x
    if HAS_NORM:
        x = x * tl.load(norm_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
    acc = weight.to(tl.float32) * x[None, :]
    if GATED > 0:
        up_acc = up_weight.to(tl.float32) * x[None, :]
    for start in range(BLOCK_K, K, BLOCK_K):
        in_range = start + columns < K
        mask = row_mask[:, None] & in_range[None, :]
        x = tl.load(x_ptr + start + columns, mask=in_range, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x = x * tl.load(norm_ptr + start + columns, mask=in_range, other=0.0).to(tl.float32)
        weight = tl.load(row_ptr + start, mask=mask, other=0.0, eviction_policy="evict_first")
        acc += weight.to(tl.float32) * x[None, :]
        if GATED > 0:
            up_weight = tl.load(up_ptr + start, mask=mask, other=0.0, eviction_policy="evict_first")
            up_acc += up_weight.to(tl.float32) * x[None, :]
    out = tl.sum(acc, axis=1)
    if HAS_NORM:
        scale = tl.math.rsqrt(tl.sum(squares, axis=0) / K + eps)
        out = out * scale
    if HAS_BIAS:
        out += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if GATED > 0:
        up = tl.sum(up_acc, axis=1)
        if HAS_NORM:
            up = up * scale
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + rows, mask=row_mask, other=0.0).to(tl.float32)
        out = activate(out, GATED - 1) * up
    if HAS_RESIDUAL:
        out = tl.load(residual_ptr + rows, mask=row_mask, other=0.0).to(tl.float32) + out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=row_mask)


@triton.jit
def _dot_range(
    x_ptr,
    norm_ptr,
    row_ptr,
    row_mask,
    begin,
    end,
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Sums over K tiles begin to end - 1: (BLOCK_N, BLOCK_M) of W x^T twice, and the rows' sums of squares."""
    columns = tl.arange(0, BLOCK_K)
    tokens = tl.arange(0, BLOCK_M)
    token_mask = (tokens < num_rows)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for tile in tl.range(begin, end, num_stages=NUM_STAGES):
        places = tile * BLOCK_K + columns
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            weight = tl.load(row_ptr + tile * BLOCK_K, eviction_policy="evict_first")
            x_mask = token_mask
        else:
            mask = row_mask[:, None] & (places < K)[None, :]
            x_mask = token_mask & (places < K)[None, :]
            weight = tl.load(row_ptr + tile * BLOCK_K, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + tokens[:, None] * x_stride + places[None, :], mask=x_mask, other=0.0)
        if HAS_NORM:
            x_float = x.to(tl.float32)
            squares += tl.sum(x_float * x_float, axis=1)
            if K % BLOCK_K == 0:
                norm = tl.load(norm_ptr + places).to(tl.float32)
            else:
                norm = tl.load(norm_ptr + places, mask=places < K, other=0.0).to(tl.float32)
            x = (x_float * norm[None, :]).to(x.dtype)
        acc = tl.dot(weight, tl.trans(x), acc)
        if IS_GATED:
            if N % BLOCK_N == 0 and K % BLOCK_K == 0:
                up_weight = tl.load(row_ptr + N * K + tile * BLOCK_K, eviction_policy="evict_first")
            else:
                up_weight = tl.load(row_ptr + N * K + tile * BLOCK_K, mask=mask, other=0.0)
            up_acc = tl.dot(up_weight, tl.trans(x), up_acc)
    return acc, up_acc, squares


@triton.jit
def _store_part(
    partial_ptr,
    squares_ptr,
    program,
    acc,
    up_acc,
    squares,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Stores the sums of one program; `program` counts those of a tile one after the other."""
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    tokens = tl.arange(0, BLOCK_M)
    place = program * PARTS * BLOCK_N * BLOCK_M
    inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tokens[None, :]
    tl.store(partial_ptr + place + inside, acc)
    if IS_GATED:
        tl.store(partial_ptr + place + BLOCK_N * BLOCK_M + inside, up_acc)
    if HAS_NORM:
        tl.store(squares_ptr + program * BLOCK_M + tokens, squares)


@triton.jit
def _add_parts(
    partial_ptr,
    squares_ptr,
    first_program,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """What SPLIT_K programs stored, added in the order of K: as `_dot_range` returns it."""
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    tokens = tl.arange(0, BLOCK_M)
    inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tokens[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for split in range(SPLIT_K):
        place = (first_program + split) * PARTS * BLOCK_N * BLOCK_M
        acc += tl.load(partial_ptr + place + inside, cache_modifier=".cg")
        if IS_GATED:
            up_acc += tl.load(partial_ptr + place + BLOCK_N * BLOCK_M + inside, cache_modifier=".cg")
        if HAS_NORM:
            squares += tl.load(squares_ptr + (first_program + split) * BLOCK_M + tokens, cache_modifier=".cg")
    return acc, up_acc, squares


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    squares_ptr,
    counters_ptr,
    eps,
    num_rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `one_row_kernel` for up to BLOCK_M rows. SPLIT_K programs share a tile of outputs; the last one to finish adds
    their sums, in the order of K."""
    tile_n = tl.program_id(0)
    split = tl.program_id(1)
    rows = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    tokens = tl.arange(0, BLOCK_M)
    row_mask = rows < N
    row_ptr = weight_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    NUM_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    A_SPLIT: tl.constexpr = (NUM_TILES + SPLIT_K - 1) // SPLIT_K
    begin = split * A_SPLIT
    end = tl.minimum(begin + A_SPLIT, NUM_TILES)
    wait_for_inputs(PDL)
    acc, up_acc, squares = _dot_range(
        x_ptr, norm_ptr, row_ptr, row_mask, begin, end, num_rows, x_stride,
        N, K, HAS_NORM, GATED > 0, BLOCK_N, BLOCK_M, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    if SPLIT_K > 1:
        first_program = tile_n * SPLIT_K
        _store_part(
            partial_ptr, squares_ptr, first_program + split, acc, up_acc, squares, HAS_NORM, GATED > 0, BLOCK_N, BLOCK_M
        )
        tl.debug_barrier()
        num_done = tl.atomic_add(counters_ptr + tile_n, 1, sem="acq_rel")
        if num_done != SPLIT_K - 1:
            return
        tl.store(counters_ptr + tile_n, 0)
        acc, up_acc, squares = _add_parts(
            partial_ptr, squares_ptr, first_program, HAS_NORM, GATED > 0, BLOCK_N, BLOCK_M, SPLIT_K
        )
    if HAS_NORM:
        scale = tl.math.rsqrt(squares / K + eps)
        acc = acc * scale[None, :]
        up_acc = up_acc * scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    if GATED > 0:
        if HAS_BIAS:
            up_acc += tl.load(bias_ptr + N + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        acc = activate(acc, GATED - 1) * up_acc
    out_mask = row_mask[:, None] & (tokens < num_rows)[None, :]
    places = tokens.to(tl.int64)[None, :] * out_stride + rows[:, None]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + places, mask=out_mask, other=0.0).to(tl.float32)
        acc = residual + acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
