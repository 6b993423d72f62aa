"""The right `WeightSource` for a model. Called by the worker when it loads."""

from __future__ import annotations

from typing import Literal

import torch

from sonar.config import ModelConfig
from sonar.gguf_file import GGUFFile
from sonar.model_source import ModelKind, ModelSource
from sonar.models.base import WeightSource
from sonar.weights.dummy_weights import DummyWeights
from sonar.weights.gguf_weights import GGUFWeights
from sonar.weights.safetensors_weights import SafetensorsWeights


def open_weights(
    source: ModelSource,
    config: ModelConfig,
    load_format: Literal["auto", "dummy"],
    dtype: torch.dtype,
    device: torch.device,
) -> WeightSource:
    """Open the weights of `source`; nothing is read yet but headers.

    Args:
        load_format: "dummy" makes random weights and opens nothing.
        dtype: compute dtype: that of norm weights and biases. device: where those go.

    Raises:
        ModelError: files are missing, cut short or damaged; named.
    """
    if load_format == "dummy":
        return DummyWeights(config, dtype, device)
    if source.kind is ModelKind.GGUF:
        return GGUFWeights(GGUFFile(source.path), config, dtype, device)
    return SafetensorsWeights(source.path, config, dtype, device)
