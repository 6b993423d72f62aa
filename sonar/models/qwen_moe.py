"""Qwen2-MoE and Qwen3-MoE: qwen2 with an expert that every token shares, behind a gate, and qwen3 without one.

`ModelConfig.extra` keys read here, 1.0 for true, 0.0 when absent:
    "o_proj_bias": attention's output projection has a bias (Hugging Face: `attention_bias`, which sets `qkv_bias` too).
"""

from __future__ import annotations

from sonar.config import ModelConfig
from sonar.layers.moe import MoeTraits
from sonar.models.base import WeightSource
from sonar.models.decoder import DecoderModel, DecoderTraits
from sonar.ops.table import OpTable


class Qwen2MoeModel(DecoderModel):
    """The plain decoder with experts and a gated shared one. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        experts = MoeTraits(shared_name="shared_expert", shared_gate=True)
        super().__init__(config, weights, ops, DecoderTraits(qkv_bias=config.qkv_bias, experts=experts))


class Qwen3MoeModel(DecoderModel):
    """The plain decoder with Q and K norms and experts. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        traits = DecoderTraits(
            qk_norm=True,
            qkv_bias=config.qkv_bias,
            output_bias=bool(config.extra.get("o_proj_bias", 0.0)),
        )
        super().__init__(config, weights, ops, traits)
