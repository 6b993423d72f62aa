"""Llama 2 and 3, SmolLM2, and others of model_type "llama".

`ModelConfig.extra` keys read here, each 1.0 for true, 0.0 when absent:
    "o_proj_bias": attention's output projection has a bias (Hugging Face: `attention_bias`, which sets `qkv_bias` too).
    "mlp_bias": gate, up and down projections have biases.
"""

from __future__ import annotations

from sonar.config import ModelConfig
from sonar.models.base import WeightSource
from sonar.models.decoder import DecoderModel, DecoderTraits
from sonar.ops.table import OpTable


class LlamaModel(DecoderModel):
    """The plain decoder. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        traits = DecoderTraits(
            qkv_bias=config.qkv_bias,
            output_bias=bool(config.extra.get("o_proj_bias", 0.0)),
            mlp_bias=bool(config.extra.get("mlp_bias", 0.0)),
        )
        super().__init__(config, weights, ops, traits)
