"""Paged attention on a GPU: decodes by split-KV, longer queries by tiles; one step may hold both.

Steps of whole prompts of one length go to cuDNN.

Built into its table by `sonar.ops.cuda`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.ops.cuda_decode_attention import DecodeAttention, Rotation
from sonar.ops.cuda_prefill_attention import PrefillAttention
from sonar.ops.cuda_whole_prompts import attend_whole_prompts, can_serve
from sonar.ops.table import AttentionMetadata, AttentionSpec


class CudaAttention:
    """`PagedAttentionFn`. has_pdl: launch dependently (`sonar.ops.cuda_launch`)."""

    def __init__(self, device: torch.device, *, has_pdl: bool) -> None:
        self._decode = DecodeAttention(device, has_pdl=has_pdl)
        self._prefill = PrefillAttention()

    def paged_attention(
        self,
        q_THE: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See `sonar.ops.table.PagedAttentionFn`. Never waits for the device."""
        q_THE = q_THE.contiguous()
        if not metadata.num_decodes and can_serve(q_THE, metadata, spec, sinks_H):
            return attend_whole_prompts(q_THE, kv_cache, metadata, spec)
        out_THE = torch.empty_like(q_THE)
        if metadata.num_decodes:
            self._decode(q_THE, kv_cache, metadata, spec, sinks_H, out_THE)
        if metadata.num_decodes < metadata.seq_lens_R.shape[0]:
            self._prefill(q_THE, kv_cache, metadata, spec, sinks_H, out_THE)
        return out_THE.flatten(1)

    def rope_attention(
        self,
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
        """`RopeKVWriteFn` and `PagedAttentionFn` in one launch, for a step of decodes alone: (T, H * E)."""
        assert metadata.num_decodes == qkv_TX.shape[0], f"{metadata.num_decodes} decodes, {qkv_TX.shape[0]} tokens"
        shape = (qkv_TX.shape[0], spec.num_heads * spec.head_dim)
        out_TX = torch.empty(shape, dtype=qkv_TX.dtype, device=qkv_TX.device)
        rotation = Rotation(positions_T, cos_sin_PR, q_norm_E, k_norm_E, norm_eps)
        self._decode(qkv_TX, kv_cache, metadata, spec, None, out_TX, rotation)
        return out_TX
