"""Paged attention on a GPU: decodes by split-KV, longer queries by tiles; one step may hold both.

Built into its table by `sonar.ops.cuda`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.ops.cuda_decode_attention import DecodeAttention
from sonar.ops.cuda_prefill_attention import PrefillAttention
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
        out_THE = torch.empty_like(q_THE)
        if metadata.num_decodes:
            self._decode(q_THE, kv_cache, metadata, spec, sinks_H, out_THE)
        if metadata.num_decodes < metadata.seq_lens_R.shape[0]:
            self._prefill(q_THE, kv_cache, metadata, spec, sinks_H, out_THE)
        return out_THE.flatten(1)
