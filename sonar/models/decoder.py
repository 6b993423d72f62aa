"""The decoder that most families are: RMSNorm before each part, rotary positions, grouped-query attention, gated MLP.

A family's file states its `DecoderTraits` and nothing else. Knows nothing of requests, devices or file formats. Called
by the families.

Weight names (N, K in brackets; H heads, G kv heads, E head_dim, D hidden, F intermediate, V vocabulary):
    model.embed_tokens.weight (V, D), lm_head.weight (V, D) unless tied, model.norm.weight (D), and in model.layers.<i>.
    self_attn.{q,k,v}_proj.weight (H E | G E | G E, D), or fused self_attn.qkv_proj.weight
    self_attn.o_proj.weight (D, H E)
    mlp.{gate,up}_proj.weight (F, D), or fused mlp.gate_up_proj.weight (2 F, D); mlp.down_proj.weight (D, F)
    input_layernorm.weight, post_attention_layernorm.weight (D)
    in sparse layers, instead of mlp.*, those of `sonar.layers.moe`; with latent attention those of
    `sonar.layers.latent_attention`; by traits: self_attn.{q,k}_norm.weight (E), self_attn.sinks (H), biases,
    {pre,post}_feedforward_layernorm.weight (D)
`rope_freqs.weight` (rotated dims / 2) is read if the source has it: GGUF files state Llama 3's scaling by this tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sonar.config import LayerKind, ModelConfig
from sonar.layers.attention import Attention
from sonar.layers.embedding import VocabTables
from sonar.layers.latent_attention import LatentAttention, load_latent_attention
from sonar.layers.linear import Part, load_linear, load_summed_linear
from sonar.layers.mlp import GatedMlp, find_activation
from sonar.layers.moe import MoeMlp, MoeTraits, load_moe
from sonar.layers.norms import RmsNorm, load_norm_weight
from sonar.layers.rotary import build_cos_sin
from sonar.models.base import ForwardBatch, WeightSource
from sonar.ops.table import AttentionMetadata, AttentionSpec, ClampedSwiglu, LayerFn, LinearFn, OpTable

ROPE_FACTORS_NAME = "rope_freqs.weight"


@dataclass(frozen=True)
class DecoderTraits:
    """In what a family departs from llama.

    Attributes:
        qkv_bias, output_bias, mlp_bias: which linears have biases.
        qk_norm: RMSNorm per head on Q and K before the rotation.
        fused_projections: the checkpoint holds qkv_proj and gate_up_proj, each one matrix.
        sandwich_norms: a norm after attention and after the MLP too, before each is added to the residual.
        norm_offset: added to every norm weight.
        attention_scale: of the scores; 0 = 1 / sqrt(head_dim). attention_softcap, logit_softcap: 0 = off.
        embedding_scale: multiplies the embedding's output.
        sinks: self_attn.sinks (H) takes part in attention's softmax.
        experts: of sparse layers. expert_unit: in place of the configuration's activation.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_projections: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    sinks: bool = False
    experts: MoeTraits = field(default_factory=MoeTraits)
    expert_unit: ClampedSwiglu | None = None


class DecoderModel:
    """A `sonar.models.base.Model` built from config, weights and traits.

    Raises:
        ModelError: a tensor is missing or misshapen, or the activation or rope scaling is not supported.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable, traits: DecoderTraits) -> None:
        self._tables = VocabTables(
            weights,
            ops,
            embedding_name="model.embed_tokens.weight",
            head_name="lm_head.weight",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            tied=config.tie_word_embeddings,
            has_embedding=config.is_first_stage,
            has_head=config.is_last_stage,
        )
        self._final_norm: RmsNorm | None = None
        if config.is_last_stage:
            self._final_norm = _load_norm(config, weights, ops, traits, "model.norm.weight")
        weight_D = weights.tensor(f"model.layers.{config.layers.start}.input_layernorm.weight", (config.hidden_size,))
        rope_tables = _build_rope_tables(config, weights, weight_D.device)
        self._layers = [
            _DecoderLayer(config, weights, ops, traits, index, rope_tables[config.layer_kinds[index]])
            for index in config.layers
        ]
        # The scale is rounded to the compute dtype, as the embedding was trained with it (sqrt(3072) is 55.5 in bf16).
        self._embedding_scale = torch.tensor(traits.embedding_scale, dtype=weight_D.dtype).item()
        self._logit_softcap = traits.logit_softcap

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Returns hidden_TD after the final norm, or for the next stage; writes the cache."""
        residual_TD = self._embed(batch.token_ids_T) if batch.hidden_TD is None else batch.hidden_TD
        x_TD: Tensor | None = None
        for layer, kv_cache, metadata in zip(self._layers, batch.kv_layers, batch.attention, strict=True):
            x_TD = layer(x_TD, residual_TD, batch.positions_T, kv_cache, metadata)
        if self._final_norm is None:
            return residual_TD if x_TD is None else residual_TD.add_(x_TD)
        return self._final_norm(residual_TD) if x_TD is None else self._final_norm.add(x_TD, residual_TD)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Returns float32 logits_SV."""
        logits_SV = self._tables.head(hidden_SD).float()
        if self._logit_softcap == 0.0:
            return logits_SV
        return logits_SV.div_(self._logit_softcap).tanh_().mul_(self._logit_softcap)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        x_TD = self._tables.embed(token_ids_T)
        return x_TD if self._embedding_scale == 1.0 else x_TD.mul_(self._embedding_scale)


class _DecoderLayer:
    """Norm, attention, norm, MLP. Its output is not yet added to the residual: the next norm does that in one op."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        ops: OpTable,
        traits: DecoderTraits,
        index: int,
        cos_sin_PR: Tensor,
    ) -> None:
        prefix = f"model.layers.{index}."
        self._input_norm = _load_norm(config, weights, ops, traits, f"{prefix}input_layernorm.weight")
        self._attention = _load_attention(config, weights, ops, traits, index, cos_sin_PR)
        self._mlp = _load_mlp(config, weights, ops, traits, index)
        self._post_attention_norm: RmsNorm | None = None
        self._post_mlp_norm: RmsNorm | None = None
        mlp_norm_name = "post_attention_layernorm.weight"
        if traits.sandwich_norms:
            self._post_attention_norm = _load_norm(config, weights, ops, traits, f"{prefix}{mlp_norm_name}")
            self._post_mlp_norm = _load_norm(config, weights, ops, traits, f"{prefix}post_feedforward_layernorm.weight")
            mlp_norm_name = "pre_feedforward_layernorm.weight"
        self._mlp_norm = _load_norm(config, weights, ops, traits, f"{prefix}{mlp_norm_name}")
        # Between a layer's product and the residual, tensor parallel ranks add up what they have.
        self._fused = None if traits.sandwich_norms or ops.parallel is not None else ops.fused
        self._whole: LayerFn | None = None
        if self._fused is not None and isinstance(self._attention, Attention) and isinstance(self._mlp, GatedMlp):
            self._whole = self._attention.whole_layer(self._fused, self._input_norm, self._mlp, self._mlp_norm)

    def __call__(
        self,
        x_TD: Tensor | None,
        residual_TD: Tensor,
        positions_T: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor | None:
        """x_TD: the previous layer's output, if it is not in the residual yet; residual_TD is updated in place.

        Returns:
            this layer's output; None when it has been added to the residual.
        """
        fused = self._fused
        num_rows = residual_TD.shape[0]
        if self._whole is not None and fused is not None and x_TD is None and num_rows <= fused.max_layer_rows:
            self._whole(residual_TD, positions_T, kv_cache, metadata)
            return None
        if fused is not None and x_TD is None and num_rows <= fused.max_rows:
            self._attention.add_fused(residual_TD, self._input_norm, positions_T, kv_cache, metadata, fused)
            self._mlp.add_fused(residual_TD, self._mlp_norm, fused)
            return None
        x_TD = self._input_norm(residual_TD) if x_TD is None else self._input_norm.add(x_TD, residual_TD)
        x_TD = self._attention(x_TD, positions_T, kv_cache, metadata)
        if self._post_attention_norm is not None:
            x_TD = self._post_attention_norm(x_TD)
        x_TD = self._mlp(self._mlp_norm.add(x_TD, residual_TD))
        return x_TD if self._post_mlp_norm is None else self._post_mlp_norm(x_TD)


def _load_norm(config: ModelConfig, weights: WeightSource, ops: OpTable, traits: DecoderTraits, name: str) -> RmsNorm:
    return RmsNorm(weights, ops, name, config.hidden_size, config.norm_eps, traits.norm_offset)


def _load_attention(
    config: ModelConfig,
    weights: WeightSource,
    ops: OpTable,
    traits: DecoderTraits,
    index: int,
    cos_sin_PR: Tensor,
) -> Attention | LatentAttention:
    if config.mla is not None:
        scale = traits.attention_scale or config.head_dim**-0.5
        return load_latent_attention(config, weights, ops, index, cos_sin_PR, scale)
    prefix = f"model.layers.{index}.self_attn."
    head_dim, norm_eps = config.head_dim, config.norm_eps
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    parts = [Part(f"{prefix}q_proj", q_size), Part(f"{prefix}k_proj", kv_size), Part(f"{prefix}v_proj", kv_size)]
    if traits.fused_projections:
        parts = [Part(f"{prefix}qkv_proj", q_size + 2 * kv_size)]
    output_part = Part(f"{prefix}o_proj", config.hidden_size)
    output = load_summed_linear(weights, ops, output_part, q_size, bias=traits.output_bias)
    q_norm_E = k_norm_E = None
    if traits.qk_norm:
        q_norm_E = load_norm_weight(weights, f"{prefix}q_norm.weight", head_dim, traits.norm_offset)
        k_norm_E = load_norm_weight(weights, f"{prefix}k_norm.weight", head_dim, traits.norm_offset)
    spec = AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=head_dim,
        scale=traits.attention_scale or head_dim**-0.5,
        window=config.sliding_window if config.layer_kinds[index] is LayerKind.SLIDING else 0,
        softcap=traits.attention_softcap,
    )
    return Attention(
        ops,
        spec,
        qkv=load_linear(weights, ops, parts, config.hidden_size, bias=traits.qkv_bias),
        output=output,
        cos_sin_PR=cos_sin_PR,
        q_norm_E=q_norm_E,
        k_norm_E=k_norm_E,
        norm_eps=norm_eps,
        sinks_H=weights.tensor(f"{prefix}sinks", (config.num_heads,)) if traits.sinks else None,
    )


def _load_mlp(
    config: ModelConfig, weights: WeightSource, ops: OpTable, traits: DecoderTraits, index: int
) -> GatedMlp | MoeMlp:
    if config.moe is not None and index in config.moe.sparse_layers:
        unit = traits.expert_unit or find_activation(config.activation)
        return load_moe(weights, ops, index, config.hidden_size, config.moe, unit, traits.experts)
    prefix, hidden, intermediate = f"model.layers.{index}.mlp.", config.hidden_size, config.intermediate_size
    parts = [Part(f"{prefix}gate_proj", intermediate), Part(f"{prefix}up_proj", intermediate)]
    if traits.fused_projections:
        parts = [Part(f"{prefix}gate_up_proj", 2 * intermediate)]
    gate_up: LinearFn = load_linear(weights, ops, parts, hidden, bias=traits.mlp_bias)
    down = load_summed_linear(weights, ops, Part(f"{prefix}down_proj", hidden), intermediate, bias=traits.mlp_bias)
    return GatedMlp(ops, gate_up, down, find_activation(config.activation))


def _build_rope_tables(config: ModelConfig, weights: WeightSource, device: torch.device) -> dict[LayerKind, Tensor]:
    """One table a layer kind. Kinds of equal settings (all but gemma's) share it: at 131,072 positions it is 64 MiB."""
    factors_X = None
    if weights.has(ROPE_FACTORS_NAME):
        factors_X = weights.tensor(ROPE_FACTORS_NAME, (config.rope[config.layer_kinds[0]].dim // 2,))
    tables: dict[LayerKind, Tensor] = {}
    for kind in dict.fromkeys(config.layer_kinds):
        twin = next((other for other in tables if config.rope[other] == config.rope[kind]), None)
        if twin is not None:
            tables[kind] = tables[twin]
            continue
        tables[kind] = build_cos_sin(config.rope[kind], config.max_position, device, factors_X)
    return tables
