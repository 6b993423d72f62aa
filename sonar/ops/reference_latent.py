"""Latent attention (MLA; DeepSeek-V2, section 2.1) in its absorbed form: one cached vector a token for all heads.

Attention is that of `PagedAttentionFn` over a view in which keys and values are the same memory. Built into the
reference table by `sonar.ops.reference`, and into others with their own norm and attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.ops.reference_attention import rotate
from sonar.ops.table import AttentionMetadata, AttentionSpec, PagedAttentionFn, RmsNormFn


class LatentOps:
    """`LatentWriteFn` and `LatentAttentionFn` out of a backend's norm and attention."""

    def __init__(self, rms_norm: RmsNormFn, paged_attention: PagedAttentionFn) -> None:
        self._rms_norm = rms_norm
        self._paged_attention = paged_attention

    def write(
        self,
        q_rope_THR: Tensor,
        latent_TX: Tensor,
        positions_T: Tensor,
        cos_sin_PR: Tensor,
        norm_C: Tensor,
        norm_eps: float,
        kv_cache: Tensor,
        slot_mapping_T: Tensor,
    ) -> Tensor:
        """See `sonar.ops.table.LatentWriteFn`."""
        latent_TC, key_TR = torch.split(latent_TX, [norm_C.shape[0], q_rope_THR.shape[-1]], dim=-1)
        cos_T1X, sin_T1X = cos_sin_PR.index_select(0, positions_T).unsqueeze(1).chunk(2, dim=-1)
        key_TR = rotate(key_TR.unsqueeze(1), cos_T1X, sin_T1X).squeeze(1)
        written_TX = torch.cat((self._rms_norm(latent_TC.contiguous(), norm_C, norm_eps), key_TR), dim=-1)
        block_size = kv_cache.shape[3]
        where_T = (slot_mapping_T // block_size, slot_mapping_T % block_size)
        kv_cache[:, 0, 0].index_put_(where_T, written_TX.to(kv_cache.dtype))
        return rotate(q_rope_THR, cos_T1X, sin_T1X)

    def attention(
        self, q_THX: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec, value_dim: int
    ) -> Tensor:
        """See `sonar.ops.table.LatentAttentionFn`."""
        both = kv_cache.expand(-1, 2, -1, -1, -1)
        out_TX = self._paged_attention(q_THX, both, metadata, spec)
        return out_TX.view(q_THX.shape)[..., :value_dim]
