"""Gemma 3, text: embedding scaled by sqrt(hidden_size), a norm before and after each part, Q and K norms, and layers of
two kinds, sliding and full, each with its own rotary base.

Norms multiply by 1 + weight: the weight source hands over Hugging Face's weight, whatever the file holds, and the 1 is
added here.

`ModelConfig.extra` keys read here, named as in config.json:
    "query_pre_attn_scalar": scores are divided by its square root; absent = head_dim.
    "attn_logit_softcapping", "final_logit_softcapping": absent or 0 = off (null in every published Gemma 3).
"""

from __future__ import annotations

from sonar.config import ModelConfig
from sonar.models.base import WeightSource
from sonar.models.decoder import DecoderModel, DecoderTraits
from sonar.ops.table import OpTable


class Gemma3TextModel(DecoderModel):
    """The sandwich-norm decoder. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        traits = DecoderTraits(
            qkv_bias=config.qkv_bias,
            qk_norm=True,
            sandwich_norms=True,
            norm_offset=1.0,
            attention_scale=config.extra.get("query_pre_attn_scalar", config.head_dim) ** -0.5,
            attention_softcap=config.extra.get("attn_logit_softcapping", 0.0),
            logit_softcap=config.extra.get("final_logit_softcapping", 0.0),
            embedding_scale=config.hidden_size**0.5,
        )
        super().__init__(config, weights, ops, traits)
