"""Rotation, cache write and paged attention on the compiled kernels. Built into its table by `sonar.ops.cpu`."""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.ops import _cpu
from sonar.ops.cpu_rows import as_float32
from sonar.ops.table import AttentionMetadata, AttentionSpec

# GGML's numbers of the types a cache may have.
_CACHE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_MAX_HEAD_DIM = 576
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
    qkv, heads = as_float32(qkv_TX), Heads(cos_sin_PR, q_norm_E, k_norm_E, norm_eps, spec)
    q_THE = torch.empty((qkv.shape[0], spec.num_heads, spec.head_dim))
    _cpu.rope_kv_write(
        qkv.data_ptr(),
        qkv.shape[1],
        *heads.arguments,
        *token_arguments(positions_T, kv_cache, slot_mapping_T, spec.head_dim),
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
    q, sinks = as_float32(q_THE), None if sinks_H is None else as_float32(sinks_H)
    out_TX = torch.empty((q.shape[0], spec.num_heads * spec.head_dim))
    _cpu.attention(
        q.data_ptr(),
        *_cache_arguments(kv_cache, spec.head_dim),
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        *request_arguments(metadata),
        *score_arguments(spec),
        0 if sinks is None else sinks.data_ptr(),
        out_TX.data_ptr(),
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
    qkv, heads = as_float32(qkv_TX), Heads(cos_sin_PR, q_norm_E, k_norm_E, norm_eps, spec)
    out_TX = torch.empty((qkv.shape[0], spec.num_heads * spec.head_dim))
    _cpu.rope_attention(
        qkv.data_ptr(),
        qkv.shape[1],
        *heads.arguments,
        *token_arguments(positions_T, kv_cache, metadata.slot_mapping_T, spec.head_dim),
        *request_arguments(metadata),
        *score_arguments(spec),
        out_TX.data_ptr(),
    )
    return out_TX if qkv_TX.dtype is torch.float32 else out_TX.to(qkv_TX.dtype)


class Heads:
    """A layer's heads as the kernels take them: rotation, norms, counts.

    Owns the float32 copies that `arguments` points to, where the given tensors are not float32.
    """

    def __init__(
        self,
        cos_sin_PR: Tensor | None,
        q_norm_E: Tensor | None,
        k_norm_E: Tensor | None,
        norm_eps: float,
        spec: AttentionSpec,
    ) -> None:
        assert spec.num_heads // spec.num_kv_heads <= _MAX_GROUP, f"{spec.num_heads} heads on {spec.num_kv_heads}"
        assert spec.head_dim <= _MAX_HEAD_DIM, f"heads of {spec.head_dim}"
        tensors = [None if x is None else as_float32(x) for x in (cos_sin_PR, q_norm_E, k_norm_E)]
        cos_sin, q_norm, k_norm = tensors
        self._kept = tensors
        self.arguments: tuple[int | float, ...] = (
            0 if cos_sin is None else cos_sin.data_ptr(),
            0 if cos_sin is None else cos_sin.shape[1],
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            norm_eps,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
        )


def token_arguments(positions_T: Tensor, kv_cache: Tensor, slot_mapping_T: Tensor, head_dim: int) -> tuple[int, ...]:
    """Where a step's tokens go."""
    assert positions_T.is_contiguous() and slot_mapping_T.is_contiguous()
    num_tokens, positions = positions_T.shape[0], positions_T.data_ptr()
    return (num_tokens, positions, *_cache_arguments(kv_cache, head_dim), slot_mapping_T.data_ptr())


def request_arguments(metadata: AttentionMetadata) -> tuple[int, ...]:
    """What a step's requests see."""
    table_RB, seq_lens_R = metadata.block_table_RB, metadata.seq_lens_R
    query_start = metadata.query_start_R1.data_ptr()
    return (table_RB.data_ptr(), table_RB.stride(0), query_start, seq_lens_R.data_ptr(), seq_lens_R.shape[0])


def score_arguments(spec: AttentionSpec) -> tuple[float, int, float]:
    """How scores are formed."""
    return (spec.scale, spec.window, spec.softcap)


def _cache_arguments(kv_cache: Tensor, head_dim: int) -> tuple[int, int, int, int, int, int, int]:
    """Address, type, byte strides of block, K or V, head and slot, block size."""
    block, kv, head, slot, element = kv_cache.stride()
    assert element == 1 and kv_cache.shape[4] == head_dim, f"cache {kv_cache.shape}, head {head_dim}"
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
