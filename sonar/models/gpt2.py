"""GPT-2: learned positions, LayerNorm, biases everywhere, Q, K, V in one matrix, a plain MLP, tied head.

Weight names: transformer.wte.weight (V, D), transformer.wpe.weight (P, D), transformer.ln_f.{weight,bias}, and in
transformer.h.<i>. ln_1, ln_2, attn.c_attn (3 D, D), attn.c_proj (D, D), mlp.c_fc (F, D), mlp.c_proj (D, F), each with
weight and bias. The source hands matrices over as (N, K), though GPT-2's safetensors hold them transposed.

`ModelConfig.extra` keys read here, named as in config.json, 1.0 for true:
    "scale_attn_weights": scores are divided by sqrt(head_dim); absent = true.
    "scale_attn_by_inverse_layer_idx": and by the layer's number from 1; absent = false.
"""

from __future__ import annotations

from torch import Tensor

from sonar.config import ModelConfig
from sonar.layers.attention import Attention
from sonar.layers.embedding import VocabTables
from sonar.layers.linear import Part, load_linear, load_summed_linear
from sonar.layers.mlp import Mlp, find_activation
from sonar.layers.norms import LayerNorm
from sonar.models.base import ForwardBatch, WeightSource
from sonar.ops.table import AttentionMetadata, AttentionSpec, EmbeddingFn, OpTable


class GPT2Model:
    """A `sonar.models.base.Model`.

    Raises:
        ModelError: a tensor is missing or misshapen, or the activation is not supported.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        hidden = config.hidden_size
        self._tables = VocabTables(
            weights,
            ops,
            embedding_name="transformer.wte.weight",
            head_name="lm_head.weight",
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            tied=config.tie_word_embeddings,
            has_embedding=config.is_first_stage,
            has_head=config.is_last_stage,
        )
        self._position_embed: EmbeddingFn | None = None
        if config.is_first_stage:
            table = weights.matrix("transformer.wpe.weight", (config.max_position, hidden))
            self._position_embed = ops.embedding(table)
        self._layers = [_GPT2Layer(config, weights, ops, index) for index in config.layers]
        self._final_norm: LayerNorm | None = None
        if config.is_last_stage:
            self._final_norm = LayerNorm(weights, ops, "transformer.ln_f", hidden, config.norm_eps)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Returns hidden_TD after the final norm, or for the next stage; writes the cache."""
        residual_TD = batch.hidden_TD
        if residual_TD is None:
            assert self._position_embed is not None, "a later stage is given hidden states"
            residual_TD = self._tables.embed(batch.token_ids_T)
            residual_TD += self._position_embed(batch.positions_T)
        for layer, kv_cache, metadata in zip(self._layers, batch.kv_layers, batch.attention, strict=True):
            layer(residual_TD, batch.positions_T, kv_cache, metadata)
        return residual_TD if self._final_norm is None else self._final_norm(residual_TD)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Returns float32 logits_SV."""
        return self._tables.head(hidden_SD).float()


class _GPT2Layer:
    """LayerNorm, attention, LayerNorm, MLP, each part added to the residual."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable, index: int) -> None:
        prefix, hidden, inner = f"transformer.h.{index}.", config.hidden_size, config.intermediate_size
        self._attention_norm = LayerNorm(weights, ops, f"{prefix}ln_1", hidden, config.norm_eps)
        self._mlp_norm = LayerNorm(weights, ops, f"{prefix}ln_2", hidden, config.norm_eps)
        heads = config.num_heads * config.head_dim
        spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=_attention_scale(config, index),
        )
        self._attention = Attention(
            ops,
            spec,
            qkv=load_linear(weights, ops, [Part(f"{prefix}attn.c_attn", 3 * heads)], hidden, bias=True),
            output=load_summed_linear(weights, ops, Part(f"{prefix}attn.c_proj", hidden), heads, bias=True),
            cos_sin_PR=None,
        )
        self._mlp = Mlp(
            ops,
            load_linear(weights, ops, [Part(f"{prefix}mlp.c_fc", inner)], hidden, bias=True),
            load_summed_linear(weights, ops, Part(f"{prefix}mlp.c_proj", hidden), inner, bias=True),
            find_activation(config.activation),
        )

    def __call__(self, residual_TD: Tensor, positions_T: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        """Updates residual_TD in place."""
        residual_TD += self._attention(self._attention_norm(residual_TD), positions_T, kv_cache, metadata)
        residual_TD += self._mlp(self._mlp_norm(residual_TD))


def _attention_scale(config: ModelConfig, index: int) -> float:
    scale = config.head_dim**-0.5 if config.extra.get("scale_attn_weights", 1.0) else 1.0
    return scale / (index + 1) if config.extra.get("scale_attn_by_inverse_layer_idx", 0.0) else scale
