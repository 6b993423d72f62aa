"""DeepSeek-V2 and V3 (R1 too): latent attention, dense first layers, then many small experts and shared ones.

V3 chooses experts with a bias that its training moved to even out the load.
"""

from __future__ import annotations

from sonar.config import LayerKind, ModelConfig
from sonar.layers.moe import MoeTraits
from sonar.layers.rotary import yarn_mscale
from sonar.models.base import WeightSource
from sonar.models.decoder import DecoderModel, DecoderTraits
from sonar.ops.table import OpTable


class DeepseekV2Model(DecoderModel):
    """The decoder with latent attention and experts. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        super().__init__(config, weights, ops, DecoderTraits(attention_scale=_attention_scale(config)))


class DeepseekV3Model(DecoderModel):
    """V2 with a bias in the choice of experts. Raises `ModelError` as `DecoderModel` does."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: OpTable) -> None:
        traits = DecoderTraits(attention_scale=_attention_scale(config), experts=MoeTraits(correction_bias=True))
        super().__init__(config, weights, ops, traits)


def _attention_scale(config: ModelConfig) -> float:
    """Of the scores: YaRN's sharpening of the whole head is applied here, twice, for queries and keys."""
    rope = config.rope[LayerKind.FULL]
    sharpening = rope.parameters.get("mscale_all_dim", 0.0)
    factor = yarn_mscale(rope.parameters["factor"], sharpening) if sharpening else 1.0
    return float(config.head_dim**-0.5) * factor * factor
