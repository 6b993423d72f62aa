"""Attention of one query token a request over its cached tokens, as one Triton kernel (split-KV).

A program takes one request, one kv head with all query heads that read it, and one split of the tokens. How many splits
there are is fixed by the launch, how many of them have work follows from the request's length on the device: so a
captured launch serves any length. Where it is given the projections instead of queries, it also does what
`sonar.ops.cuda_rope` does, in place of a launch of its own: every split rotates its queries, the one that holds the
newest token writes its K and V. The last program of a head to finish merges the splits (Milakov & Gimelshein 2018,
online normalizer; Dao et al. 2023, Flash-Decoding). Called by `sonar.ops.cuda_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonar.ops.cuda_launch import ceil_div, power_of_two, wait_for_inputs
from sonar.ops.cuda_rope import load_rotated
from sonar.ops.table import AttentionMetadata, AttentionSpec

# tl.dot wants 16 rows at least; heads that read one kv head are padded to that.
_MIN_ROWS = 16
# Programs that keep an H200's 132 multiprocessors loading: four each.
_WANTED_PROGRAMS = 528
_FEW_PROGRAMS = 128
_MAX_SPLITS = 64


@triton.jit
def apply_softcap(scores, softcap):
    """softcap * tanh(scores / softcap)."""
    return softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)


@triton.jit
def _share_of_split(seq_len, split, num_splits, least_tiles, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Which tokens a split takes: first one seen by the request, its tiles begin to end - 1, splits that have work."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    first_tile = first // TILE
    num_tiles = tl.cdiv(seq_len, TILE) - first_tile
    tiles_a_split = tl.maximum(tl.cdiv(num_tiles, num_splits), least_tiles)
    num_active = tl.maximum(tl.cdiv(num_tiles, tiles_a_split), 1)
    begin = first_tile + split * tiles_a_split
    end = tl.minimum(begin + tiles_a_split, first_tile + num_tiles)
    return first, begin, end, num_active


@triton.jit
def _load_queries(
    q_row,
    mask,
    q_norm_ptr,
    cos_sin_row,
    norm_eps,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """The queries that read one kv head, (ROWS, DIMS), rotated if HAS_ROPE. q_row: (ROWS, 1), where each begins."""
    if HAS_ROPE:
        q = load_rotated(q_row, mask, q_norm_ptr, cos_sin_row, norm_eps, HEAD_DIM, DIMS, ROTARY_DIM, HAS_NORM)
    else:
        q = tl.load(q_row + tl.arange(0, DIMS)[None, :], mask=mask, other=0.0)
    return q


@triton.jit
def _write_new_token(
    k_ptr,
    head_ptr,
    slot,
    k_norm_ptr,
    cos_sin_row,
    norm_eps,
    block_stride,
    kv_stride,
    token_stride,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Writes the newest token's K, rotated, and V of one head to the cache; nowhere with a negative slot.

    k_ptr: the head's K in the projections; its V lies NUM_KV heads on. head_ptr: the head's place in block 0.
    """
    if slot >= 0:
        dims = tl.arange(0, DIMS)[None, :]
        mask = dims < HEAD_DIM
        k_row = k_ptr + tl.zeros((1, 1), tl.int32)
        k = load_rotated(k_row, mask, k_norm_ptr, cos_sin_row, norm_eps, HEAD_DIM, DIMS, ROTARY_DIM, HAS_NORM)
        v = tl.load(k_row + NUM_KV * HEAD_DIM + dims, mask=mask, other=0.0)
        place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
        token_ptr = head_ptr + place + dims
        tl.store(token_ptr, k.to(head_ptr.dtype.element_ty), mask=mask)
        tl.store(token_ptr + kv_stride, v.to(head_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _start_softmax(sinks_ptr, heads, mask, split, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Running maximum and sum before any token, (ROWS,) each. Sinks count once: in split 0."""
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - this one is known to the compiler
        if split == 0:
            best = tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * 1.4426950408889634
            total = tl.full((ROWS,), 1.0, tl.float32)
    return best, total


@triton.jit
def _pass_over(
    q,
    acc,
    best,
    total,
    begin,
    end,
    first,
    seq_len,
    table_row,
    head_ptr,
    block_stride,
    kv_stride,
    token_stride,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes the tiles begin to end - 1 into the running softmax."""
    dims = tl.arange(0, DIMS)
    for tile in range(begin, end):
        positions = tile * TILE + tl.arange(0, TILE)
        seen = (positions < seq_len) & (positions >= first)
        block = tl.load(table_row + positions // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        place = block * block_stride + (positions % BLOCK_SIZE) * token_stride
        kv_mask = seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(head_ptr + place[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        v = tl.load(head_ptr + kv_stride + place[:, None] + dims[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = apply_softcap(scores, softcap)
        scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        best = new_best
    return acc, best, total


@triton.jit
def _merge_splits(part_ptr, stats_ptr, num_active, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """The output of a head, (ROWS, DIMS), from what its splits stored; part_ptr and stats_ptr point to split 0's."""
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    for split in range(0, num_active):
        # Other programs wrote these: past the first cache, which may hold an older state.
        its_best = tl.load(stats_ptr + split * (ROWS * 2), cache_modifier=".cg")
        its_total = tl.load(stats_ptr + split * (ROWS * 2) + 1, cache_modifier=".cg")
        its_acc = tl.load(part_ptr + split * (ROWS * DIMS), cache_modifier=".cg")
        new_best = tl.maximum(best, its_best)
        shrink = tl.exp2(best - new_best)
        its_shrink = tl.exp2(its_best - new_best)
        total = total * shrink + its_total * its_shrink
        acc = acc * shrink[:, None] + its_acc * its_shrink[:, None]
        best = new_best
    return acc / total[:, None]


@triton.jit
def _finish_split(
    out_row,
    mask,
    part_ptr,
    stats_ptr,
    counter_ptr,
    split,
    num_active,
    acc,
    best,
    total,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Writes the output, or stores this split's part and merges them all if it is the last.

    out_row: (ROWS, DIMS), where the output goes. part_ptr, stats_ptr: as `_merge_splits`. counter_ptr: splits done.
    """
    if num_active == 1:
        alone = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_row, alone.to(out_row.dtype.element_ty), mask=mask)
    else:
        tl.store(part_ptr + split * (ROWS * DIMS), acc)
        tl.store(stats_ptr + split * (ROWS * 2), best)
        tl.store(stats_ptr + split * (ROWS * 2) + 1, total)
        # The barrier brings the stores of the whole program before the counter, whose release publishes them.
        tl.debug_barrier()
        num_done = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        if num_done == num_active - 1:
            tl.store(counter_ptr, 0)
            merged = _merge_splits(part_ptr, stats_ptr, num_active, ROWS, DIMS)
            tl.store(out_row, merged.to(out_row.dtype.element_ty), mask=mask)


# What differs from step to step is not compiled for: a new variant would stall a running service for a second.
@triton.jit(do_not_specialize=["num_splits", "least_tiles", "table_stride"])
def _decode_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    table_ptr,
    seq_lens_ptr,
    sinks_ptr,
    partial_ptr,
    partial_stats_ptr,
    counters_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    norm_eps,
    scale,
    softcap,
    num_splits,
    least_tiles,
    q_stride,
    table_stride,
    block_stride,
    kv_stride,
    head_stride,
    token_stride,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head, split = tl.program_id(0), tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows
    wait_for_inputs(PDL)
    seq_len = tl.load(seq_lens_ptr + request)
    first, begin, end, num_active = _share_of_split(seq_len, split, num_splits, least_tiles, TILE, WINDOW)
    if split >= num_active:
        return

    qkv_row = q_ptr + request * q_stride
    head_ptr = cache_ptr + kv_head * head_stride
    cos_sin_row = cos_sin_ptr + tl.load(positions_ptr + request) * ROTARY_DIM  # moves by 0 without HAS_ROPE
    q_row = qkv_row + heads[:, None] * HEAD_DIM
    q = _load_queries(q_row, mask, q_norm_ptr, cos_sin_row, norm_eps, HEAD_DIM, DIMS, HAS_ROPE, ROTARY_DIM, HAS_NORM)
    if HAS_ROPE:  # noqa: SIM102 - this one is known to the compiler
        if split == num_active - 1:
            _write_new_token(
                qkv_row + (kv_head + NUM_KV * GROUP) * HEAD_DIM, head_ptr, tl.load(slots_ptr + request),
                k_norm_ptr, cos_sin_row, norm_eps, block_stride, kv_stride, token_stride,
                NUM_KV, HEAD_DIM, DIMS, BLOCK_SIZE, ROTARY_DIM, HAS_NORM,
            )  # fmt: skip
            tl.debug_barrier()  # this program reads them back below
    best, total = _start_softmax(sinks_ptr, heads, rows < GROUP, split, ROWS, HAS_SINKS)
    acc, best, total = _pass_over(
        q, tl.zeros((ROWS, DIMS), tl.float32), best, total, begin, end, first, seq_len,
        table_ptr + request * table_stride, head_ptr, block_stride, kv_stride, token_stride, scale, softcap,
        HEAD_DIM, DIMS, BLOCK_SIZE, TILE, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip
    pair = request * NUM_KV + kv_head
    _finish_split(
        out_ptr + request * (NUM_KV * GROUP * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :], mask,
        partial_ptr + pair * (num_splits * ROWS * DIMS) + rows[:, None] * DIMS + dims[None, :],
        partial_stats_ptr + pair * (num_splits * ROWS * 2) + rows * 2,
        counters_ptr + pair, split, num_active, acc, best, total, ROWS, DIMS,
    )  # fmt: skip


@dataclass(frozen=True)
class Rotation:
    """What `RopeKVWriteFn` is given beside the projections and the cache."""

    positions_T: Tensor
    cos_sin_PR: Tensor | None
    q_norm_E: Tensor | None
    k_norm_E: Tensor | None
    norm_eps: float


class Splits(NamedTuple):
    """How the tokens of a request are shared out: among at most `most` programs, at least `least_tiles` each."""

    most: int
    least_tiles: int


def choose_splits(num_requests: int, num_kv_heads: int, max_seq_len: int, tile: int) -> Splits:
    """Enough programs to fill the device, none for less than merging costs.

    Few requests are split as far as they go, for their own latency. Many fill the device unsplit: programs that only
    find out that they have no work cost 5 us a layer of 256 requests.
    """
    programs = num_requests * num_kv_heads
    if programs >= _WANTED_PROGRAMS:
        return Splits(1, 1)
    least_tiles = 1 if programs <= _FEW_PROGRAMS else 2
    wanted = power_of_two(ceil_div(2 * _WANTED_PROGRAMS, programs))
    most = power_of_two(ceil_div(ceil_div(max_seq_len, tile), least_tiles))
    return Splits(min(wanted, most, _MAX_SPLITS), least_tiles)


class DecodeAttention:
    """Attention of decodes. Owns the counters by which the programs of a head agree who merges.

    Args:
        has_pdl: launch dependently (`sonar.ops.cuda_launch`).
        tile: tokens a program takes at a time. num_stages, num_warps: Triton's.
    """

    def __init__(
        self, device: torch.device, *, has_pdl: bool, tile: int = 128, num_stages: int = 3, num_warps: int = 4
    ) -> None:
        self._has_pdl = has_pdl
        self._tile = tile
        self._num_stages, self._num_warps = num_stages, num_warps
        self._counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)

    def __call__(
        self,
        q_THE: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks_H: Tensor | None,
        out_THE: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        """Attends with the first `num_decodes` rows of q and writes those rows of out.

        Args:
            q_THE: with `rotation` the projections qkv_TX, of which K and V are written to the cache here.
        """
        num_requests, num_kv, group = metadata.num_decodes, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        assert num_requests * num_kv <= self._counters.shape[0], f"{num_requests} decodes of {num_kv} kv heads"
        rows, dims = power_of_two(group, _MIN_ROWS), power_of_two(spec.head_dim, 16)
        tile = self._tile if q_THE.dtype.itemsize == 2 and dims <= 128 else 32
        longest = min(metadata.max_seq_len, spec.window + tile) if spec.window else metadata.max_seq_len
        splits = choose_splits(num_requests, num_kv, longest, tile)
        shape = (num_requests, num_kv, splits.most, rows) if splits.most > 1 else (1, 1, 1, 1)
        partial = torch.empty((*shape, dims), dtype=torch.float32, device=q_THE.device)
        stats = torch.empty((*shape, 2), dtype=torch.float32, device=q_THE.device)
        cos_sin_PR = None if rotation is None else rotation.cos_sin_PR
        _decode_kernel[(num_kv, splits.most, num_requests)](
            q_THE,
            kv_cache,
            out_THE,
            metadata.block_table_RB,
            metadata.seq_lens_R,
            q_THE if sinks_H is None else sinks_H,
            partial,
            stats,
            self._counters,
            metadata.seq_lens_R if rotation is None else rotation.positions_T,
            metadata.slot_mapping_T,
            q_THE if cos_sin_PR is None else cos_sin_PR,
            q_THE if rotation is None or rotation.q_norm_E is None else rotation.q_norm_E,
            q_THE if rotation is None or rotation.k_norm_E is None else rotation.k_norm_E,
            0.0 if rotation is None else rotation.norm_eps,
            spec.scale,
            spec.softcap,
            splits.most,
            splits.least_tiles,
            q_THE.stride(0),
            metadata.block_table_RB.stride(0),
            *kv_cache.stride()[:4],
            NUM_KV=num_kv,
            GROUP=group,
            ROWS=rows,
            HEAD_DIM=spec.head_dim,
            DIMS=dims,
            BLOCK_SIZE=kv_cache.shape[3],
            TILE=tile,
            WINDOW=spec.window,
            HAS_SOFTCAP=spec.softcap != 0.0,
            HAS_SINKS=sinks_H is not None,
            HAS_ROPE=rotation is not None,
            ROTARY_DIM=0 if cos_sin_PR is None else cos_sin_PR.shape[1],
            HAS_NORM=rotation is not None and rotation.q_norm_E is not None,
            PRECISION="ieee" if q_THE.dtype == torch.float32 else "tf32",
            PDL=self._has_pdl,
            num_warps=self._num_warps,
            num_stages=self._num_stages,
            **({"launch_pdl": True} if self._has_pdl else {}),
        )
