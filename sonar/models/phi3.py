"""Phi-3 and Phi-4-mini: llama whose checkpoint fuses Q, K, V and gate, up; heads may be rotated in part (`rope.dim`).

LongRoPE (the 128k variants) is refused: its frequencies change with the length of the request, which a paged cache of
rotated keys cannot follow. Files that state it in config.json are refused where the config is read, GGUF files that
state it by tensors here. Reads no `ModelConfig.extra` key.
"""

from __future__ import annotations

from sonar.config import ModelConfig
from sonar.errors import ModelError
from sonar.models.base import WeightSource
from sonar.models.decoder import DecoderModel, DecoderTraits
from sonar.ops.table import OpTable

_LONG_ROPE_NAME = "rope_factors_long.weight"


class Phi3Model(DecoderModel):
    """The plain decoder from fused matrices.

    Raises:
        ModelError: LongRoPE, or as `DecoderModel` does.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        if weights.has(_LONG_ROPE_NAME):
            raise ModelError(
                f"tensor {_LONG_ROPE_NAME!r}: rope scaling 'longrope' is not supported; "
                "use a variant with the short context (e.g. Phi-3-mini-4k)",
                param="model",
            )
        super().__init__(config, weights, ops, DecoderTraits(fused_projections=True))
