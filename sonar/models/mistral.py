"""Mistral: llama, with a sliding window in every layer when `ModelConfig.layer_kinds` says so (7B v0.1: 4096 tokens).

Reads no `ModelConfig.extra` key.
"""

from __future__ import annotations

from sonar.config import ModelConfig
from sonar.models.base import WeightSource
from sonar.models.decoder import DecoderModel, DecoderTraits
from sonar.ops.table import OpTable


class MistralModel(DecoderModel):
    """The plain decoder without biases. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        super().__init__(config, weights, ops, DecoderTraits())
