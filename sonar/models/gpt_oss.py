"""gpt-oss: experts with biases and a clamped unit in every layer, attention sinks, windows in every other layer.

`ModelConfig.extra` keys read here, named as in config.json: "swiglu_alpha", "swiglu_limit".
"""

from __future__ import annotations

from sonar.config import ModelConfig
from sonar.layers.moe import MoeTraits
from sonar.models.base import WeightSource
from sonar.models.decoder import DecoderModel, DecoderTraits
from sonar.ops.table import ClampedSwiglu, OpTable


class GptOssModel(DecoderModel):
    """The plain decoder with sinks and experts. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        traits = DecoderTraits(
            qkv_bias=config.qkv_bias,
            output_bias=config.qkv_bias,
            sinks=True,
            experts=MoeTraits(router_bias=True, expert_bias=True),
            expert_unit=ClampedSwiglu(config.extra["swiglu_alpha"], config.extra["swiglu_limit"]),
        )
        super().__init__(config, weights, ops, traits)
