"""Qwen2 and Qwen2.5: llama with biases on Q, K and V, always (config.json does not say so; `qkv_bias` is not read).

Reads no `ModelConfig.extra` key.
"""

from __future__ import annotations

from sonar.config import ModelConfig
from sonar.models.base import WeightSource
from sonar.models.decoder import DecoderModel, DecoderTraits
from sonar.ops.table import OpTable


class Qwen2Model(DecoderModel):
    """The plain decoder with Q, K and V biases. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        super().__init__(config, weights, ops, DecoderTraits(qkv_bias=True))
