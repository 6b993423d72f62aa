"""Multi-head latent attention in its absorbed form (DeepSeek-V2, section 2.1): what is cached is attended to as it is.

Each head's key projection is applied to its query and its value projection to its output, so that attention runs in the
latent space over one vector a token. Rows of projections are put in another order at load: dimensions without rotation
before those with, neighbouring pairs half a head apart, as the rotation wants them. Called by the models.

Weight names, below the layer's `self_attn.` (H heads; dimensions: P unrotated, R rotated, V of values, C of the latent,
Q of the queries' latent):
    q_proj.weight (H (P + R), D), or q_a_proj.weight (Q, D), q_a_layernorm.weight (Q), q_b_proj.weight (H (P + R), Q)
    kv_a_proj_with_mqa.weight (C + R, D), kv_a_layernorm.weight (C), kv_b_proj.weight (H (P + V), C)
    o_proj.weight (D, H V); biases of q_a_proj, kv_a_proj_with_mqa and o_proj by configuration
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sonar.config import MlaConfig, ModelConfig
from sonar.layers.linear import Part, load_summed_linear
from sonar.layers.norms import RmsNorm
from sonar.ops.reference_matrix import dequantize_rows
from sonar.ops.table import (
    AttentionMetadata,
    AttentionSpec,
    FusedOps,
    GGUFMatrix,
    HeadLinearFn,
    LinearFn,
    Matrix,
    OpTable,
    PlainMatrix,
)

if TYPE_CHECKING:
    from sonar.models.base import WeightSource

_NORM_EPS = 1e-6  # of the two norms within attention; the code of these families fixes it


class LatentAttention:
    """One layer's attention.

    Args:
        down: x_TD -> (T, Q + C + R), or (T, H (P + R) + C + R) without a query latent.
        q_norm, q_up: of the query latent, or None.
        key_heads: (T, H, P) -> (T, H, C). value_heads: (T, H, C) -> (T, H, V).
    """

    def __init__(
        self,
        ops: OpTable,
        config: ModelConfig,
        mla: MlaConfig,
        *,
        scale: float,
        down: LinearFn,
        q_norm: RmsNorm | None,
        q_up: LinearFn | None,
        latent_norm_C: Tensor,
        key_heads: HeadLinearFn,
        value_heads: HeadLinearFn,
        output: LinearFn,
        cos_sin_PR: Tensor,
    ) -> None:
        self._mla = mla
        self._latent_dim = mla.kv_lora_rank + mla.qk_rope_head_dim
        self._spec = AttentionSpec(config.num_heads, 1, self._latent_dim, scale)
        self._down, self._q_norm, self._q_up = down, q_norm, q_up
        self._latent_norm_C = latent_norm_C
        self._heads = (key_heads, value_heads)
        self._output = output
        self._cos_sin_PR = cos_sin_PR
        self._ops = ops

    def __call__(self, x_TD: Tensor, positions_T: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Writes this step's latents to the cache and returns a new (T, D) tensor."""
        down_TX = self._down(x_TD)
        q_TX, latent_TX = down_TX[:, : -self._latent_dim], down_TX[:, -self._latent_dim :]
        if self._q_norm is not None and self._q_up is not None:
            q_TX = self._q_up(self._q_norm(q_TX.contiguous()))
        num_tokens, num_heads = q_TX.shape[0], self._spec.num_heads
        num_plain = num_heads * self._mla.qk_nope_head_dim
        q_nope_THP = q_TX[:, :num_plain].view(num_tokens, num_heads, self._mla.qk_nope_head_dim)
        q_rope_THR = self._ops.latent_write(
            q_TX[:, num_plain:].view(num_tokens, num_heads, self._mla.qk_rope_head_dim),
            latent_TX,
            positions_T,
            self._cos_sin_PR,
            self._latent_norm_C,
            _NORM_EPS,
            kv_cache,
            metadata.slot_mapping_T,
        )
        key_heads, value_heads = self._heads
        q_THX = torch.cat((key_heads(q_nope_THP), q_rope_THR), dim=-1)
        out_THC = self._ops.latent_attention(q_THX, kv_cache, metadata, self._spec, self._mla.kv_lora_rank)
        return self._output(value_heads(out_THC).flatten(1))

    def add_fused(
        self,
        residual_TD: Tensor,
        norm: RmsNorm,
        positions_T: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        fused: FusedOps,
    ) -> None:
        """residual += attention(norm(residual)), in place; there is nothing to fuse."""
        residual_TD.add_(self(norm(residual_TD), positions_T, kv_cache, metadata))


def load_latent_attention(
    config: ModelConfig, weights: WeightSource, ops: OpTable, layer: int, cos_sin_PR: Tensor, scale: float
) -> LatentAttention:
    """Loads one layer's attention. config.qkv_bias: the projections down and out have biases.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    mla, hidden, prefix = config.mla, config.hidden_size, f"model.layers.{layer}.self_attn."
    assert mla is not None, f"{config.architecture} without latent attention"
    q_order, kv_order = _query_order(config.num_heads, mla), _latent_order(mla)
    kv_down = f"{prefix}kv_a_proj_with_mqa"
    kv_part = _take_rows(weights.matrix(f"{kv_down}.weight", (len(kv_order), hidden)), kv_order)
    q_norm = q_up = None
    if mla.q_lora_rank:
        q_part = weights.matrix(f"{prefix}q_a_proj.weight", (mla.q_lora_rank, hidden))
        q_norm = RmsNorm(weights, ops, f"{prefix}q_a_layernorm.weight", mla.q_lora_rank, _NORM_EPS)
        up = weights.matrix(f"{prefix}q_b_proj.weight", (len(q_order), mla.q_lora_rank))
        q_up = ops.linear([_take_rows(up, q_order)], None)
    else:
        q_part = _take_rows(weights.matrix(f"{prefix}q_proj.weight", (len(q_order), hidden)), q_order)
    bias_N = _down_bias(weights, prefix, q_part.shape[0], mla, kv_order) if config.qkv_bias else None
    key_heads, value_heads = _load_heads(config, mla, weights, ops, prefix)
    output_part = Part(f"{prefix}o_proj", hidden)
    return LatentAttention(
        ops,
        config,
        mla,
        scale=scale,
        down=ops.linear([q_part, kv_part], bias_N),
        q_norm=q_norm,
        q_up=q_up,
        latent_norm_C=weights.tensor(f"{prefix}kv_a_layernorm.weight", (mla.kv_lora_rank,)),
        key_heads=key_heads,
        value_heads=value_heads,
        output=load_summed_linear(weights, ops, output_part, config.num_heads * mla.v_head_dim, bias=config.qkv_bias),
        cos_sin_PR=cos_sin_PR,
    )


def _down_bias(weights: WeightSource, prefix: str, num_q: int, mla: MlaConfig, kv_order: Tensor) -> Tensor:
    """Queries that come from the hidden state have none."""
    kv_bias = weights.tensor(f"{prefix}kv_a_proj_with_mqa.bias", (len(kv_order),))
    if mla.q_lora_rank:
        q_bias = weights.tensor(f"{prefix}q_a_proj.bias", (num_q,))
    else:
        q_bias = torch.zeros(num_q, dtype=kv_bias.dtype, device=kv_bias.device)
    return torch.cat((q_bias, kv_bias[kv_order.to(kv_bias.device)]))


def _load_heads(
    config: ModelConfig, mla: MlaConfig, weights: WeightSource, ops: OpTable, prefix: str
) -> tuple[HeadLinearFn, HeadLinearFn]:
    """Per head: the key projection turned round, (C, P), and the value projection, (V, C).

    Turned round, blocks of a quantized matrix no longer lie along its rows: such are widened.
    """
    size = mla.qk_nope_head_dim + mla.v_head_dim
    up = weights.matrix(f"{prefix}kv_b_proj.weight", (config.num_heads * size, mla.kv_lora_rank))
    rows_NC = dequantize_rows(up, 0, up.shape[0]) if isinstance(up, GGUFMatrix) else up.weight_NK
    keys, values = [], []
    for rows in rows_NC.split(size):  # type: ignore[no-untyped-call]
        keys.append(PlainMatrix(rows[: mla.qk_nope_head_dim].t().contiguous()))
        values.append(PlainMatrix(rows[mla.qk_nope_head_dim :]))
    return ops.head_linear(keys), ops.head_linear(values)


def _query_order(num_heads: int, mla: MlaConfig) -> Tensor:
    """Which row of the checkpoint comes where: all heads' unrotated rows, then all heads' rotated ones."""
    plain, size = mla.qk_nope_head_dim, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    starts_H1 = torch.arange(num_heads).unsqueeze(1) * size
    return torch.cat(((starts_H1 + torch.arange(plain)).flatten(), (starts_H1 + plain + _pair_order(mla)).flatten()))


def _latent_order(mla: MlaConfig) -> Tensor:
    return torch.cat((torch.arange(mla.kv_lora_rank), mla.kv_lora_rank + _pair_order(mla)))


def _pair_order(mla: MlaConfig) -> Tensor:
    """First members of the pairs, then the second ones."""
    order = torch.arange(mla.qk_rope_head_dim)
    return torch.cat((order[::2], order[1::2])) if mla.is_interleaved else order


def _take_rows(matrix: Matrix, order: Tensor) -> Matrix:
    """The rows in another order; quantization runs along a row, so they move whole."""
    if isinstance(matrix, PlainMatrix):
        return PlainMatrix(matrix.weight_NK[order.to(matrix.weight_NK.device)])
    return GGUFMatrix(matrix.raw_NX[order.to(matrix.raw_NX.device)], matrix.type_name, matrix.num_columns)
