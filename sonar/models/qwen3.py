"""Qwen3 (dense): llama with RMSNorm on each head of Q and K, and a head_dim of its own.

`ModelConfig.extra` keys read here, 1.0 for true, 0.0 when absent:
    "o_proj_bias": attention's output projection has a bias (Hugging Face: `attention_bias`, which sets `qkv_bias` too).
"""

from __future__ import annotations

from sonar.config import ModelConfig
from sonar.models.base import WeightSource
from sonar.models.decoder import DecoderModel, DecoderTraits
from sonar.ops.table import OpTable


class Qwen3Model(DecoderModel):
    """The plain decoder with Q and K norms. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        traits = DecoderTraits(
            qk_norm=True,
            qkv_bias=config.qkv_bias,
            output_bias=bool(config.extra.get("o_proj_bias", 0.0)),
        )
        super().__init__(config, weights, ops, traits)
