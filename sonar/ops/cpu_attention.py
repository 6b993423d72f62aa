"""Rotation, cache write and paged attention on the compiled kernels. Built into its table by `sonar.ops.cpu`."""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.ops import _cpu
from sonar.ops.cpu_rows import as_float32
from sonar.ops.table import AttentionMetadata, AttentionSpec

# GGML's numbers of the types a cache may have.
_CACHE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_MAX_HEAD_DIM = 512
_MAX_GROUP = 256


def rope_kv_write(
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
    """See `sonar.ops.table.RopeKVWriteFn`."""
    qkv, norms = as_float32(qkv_TX), (_optional(q_norm_E), _optional(k_norm_E))
    q_THE = torch.empty((qkv.shape[0], spec.num_heads, spec.head_dim))
    _cpu.rope_kv_write(
        *_rope_arguments(qkv, positions_T, cos_sin_PR, norms, norm_eps, kv_cache, slot_mapping_T, spec),
        q_THE.data_ptr(),
    )
    return q_THE if qkv_TX.dtype is torch.float32 else q_THE.to(qkv_TX.dtype)


def paged_attention(
    q_THE: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `sonar.ops.table.PagedAttentionFn`."""
    q, sinks = as_float32(q_THE), _optional(sinks_H)
    out_TX = torch.empty((q.shape[0], spec.num_heads * spec.head_dim))
    _cpu.attention(
        q.data_ptr(),
        *_cache_arguments(kv_cache, spec.head_dim),
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        *_request_arguments(metadata, spec, sinks, out_TX),
    )
    return out_TX if q_THE.dtype is torch.float32 else out_TX.to(q_THE.dtype)


def rope_attention(
    qkv_TX: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor | None,
    q_norm_E: Tensor | None,
    k_norm_E: Tensor | None,
    norm_eps: float,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
) -> Tensor:
    """`rope_kv_write` and `paged_attention` in one call, for any lengths; the same bits."""
    qkv, norms = as_float32(qkv_TX), (_optional(q_norm_E), _optional(k_norm_E))
    out_TX = torch.empty((qkv.shape[0], spec.num_heads * spec.head_dim))
    _cpu.rope_attention(
        *_rope_arguments(qkv, positions_T, cos_sin_PR, norms, norm_eps, kv_cache, metadata.slot_mapping_T, spec),
        *_request_arguments(metadata, spec, None, out_TX),
    )
    return out_TX if qkv_TX.dtype is torch.float32 else out_TX.to(qkv_TX.dtype)


def _optional(x: Tensor | None) -> Tensor | None:
    return None if x is None else as_float32(x)


def _rope_arguments(
    qkv: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor | None,
    norms: tuple[Tensor | None, Tensor | None],
    norm_eps: float,
    kv_cache: Tensor,
    slot_mapping_T: Tensor,
    spec: AttentionSpec,
) -> tuple[int | float, ...]:
    assert positions_T.is_contiguous() and slot_mapping_T.is_contiguous()
    q_norm, k_norm = norms
    return (
        qkv.data_ptr(),
        qkv.shape[1],
        qkv.shape[0],
        positions_T.data_ptr(),
        0 if cos_sin_PR is None else cos_sin_PR.data_ptr(),
        0 if cos_sin_PR is None else cos_sin_PR.shape[1],
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        norm_eps,
        *_cache_arguments(kv_cache, spec.head_dim),
        slot_mapping_T.data_ptr(),
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
    )


def _request_arguments(
    metadata: AttentionMetadata, spec: AttentionSpec, sinks: Tensor | None, out_TX: Tensor
) -> tuple[int | float, ...]:
    assert spec.num_heads // spec.num_kv_heads <= _MAX_GROUP, f"{spec.num_heads} heads on {spec.num_kv_heads}"
    table_RB, seq_lens_R = metadata.block_table_RB, metadata.seq_lens_R
    return (
        table_RB.data_ptr(),
        table_RB.stride(0),
        metadata.query_start_R1.data_ptr(),
        seq_lens_R.data_ptr(),
        seq_lens_R.shape[0],
        0 if sinks is None else sinks.data_ptr(),
        out_TX.data_ptr(),
        spec.scale,
        spec.window,
        spec.softcap,
    )


def _cache_arguments(kv_cache: Tensor, head_dim: int) -> tuple[int, int, int, int, int, int, int]:
    """Address, type, byte strides of block, K or V, head and slot, block size."""
    block, kv, head, slot, element = kv_cache.stride()
    assert element == 1 and kv_cache.shape[4] == head_dim <= _MAX_HEAD_DIM, f"cache {kv_cache.shape}, head {head_dim}"
    size = kv_cache.element_size()
    return (
        kv_cache.data_ptr(),
        _CACHE_TYPES[kv_cache.dtype],
        block * size,
        kv * size,
        head * size,
        slot * size,
        kv_cache.shape[3],
    )
