"""Mixtral: mistral with a mixture of experts in every layer."""

from __future__ import annotations

from sonar.config import ModelConfig
from sonar.models.base import WeightSource
from sonar.models.decoder import DecoderModel, DecoderTraits
from sonar.ops.table import OpTable


class MixtralModel(DecoderModel):
    """The plain decoder with experts. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        super().__init__(config, weights, ops, DecoderTraits())
