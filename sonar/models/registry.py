"""Which families there are: one literal dict of architecture (Hugging Face's `model_type`) -> class.

Imports no torch until a model is loaded, so that whoever reads a config can tell early whether it can be served.
Called by the worker, and by readers of model configs for the names.
"""

from __future__ import annotations

import importlib
import logging
import re
from typing import TYPE_CHECKING

from sonar.config import ModelConfig
from sonar.errors import ModelError

if TYPE_CHECKING:
    from sonar.models.base import Model, WeightSource
    from sonar.ops.table import OpTable

_logger = logging.getLogger(__name__)

MODELS: dict[str, str] = {
    "deepseek_v2": "sonar.models.deepseek:DeepseekV2Model",
    "deepseek_v3": "sonar.models.deepseek:DeepseekV3Model",
    "gemma3_text": "sonar.models.gemma3:Gemma3TextModel",
    "gpt2": "sonar.models.gpt2:GPT2Model",
    "gpt_oss": "sonar.models.gpt_oss:GptOssModel",
    "llama": "sonar.models.llama:LlamaModel",
    "mistral": "sonar.models.mistral:MistralModel",
    "mixtral": "sonar.models.mixtral:MixtralModel",
    "phi3": "sonar.models.phi3:Phi3Model",
    "qwen2": "sonar.models.qwen2:Qwen2Model",
    "qwen2_moe": "sonar.models.qwen_moe:Qwen2MoeModel",
    "qwen3": "sonar.models.qwen3:Qwen3Model",
    "qwen3_moe": "sonar.models.qwen_moe:Qwen3MoeModel",
}

# What checkpoints hold beside their weights: constants that are computed anew here, and a tied head's copy.
_NO_WEIGHTS = re.compile(r"(\.rotary_emb\.inv_freq|\.attn\.(bias|masked_bias)|^lm_head\.weight)$")
_LAYER_NUMBER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


def load_model(config: ModelConfig, weights: WeightSource, ops: OpTable) -> Model:
    """Builds the family's model from the weights.

    Raises:
        ModelError: unknown architecture (lists what is known); a tensor is missing or misshapen; or a layer of the
            checkpoint holds tensors that this family does not compute with, so that its output would be wrong.
    """
    if config.architecture not in MODELS:
        raise ModelError(
            f"architecture {config.architecture!r} is not supported; known are {', '.join(MODELS)}",
            param="model",
            code="unsupported_architecture",
        )
    module_name, _, class_name = MODELS[config.architecture].partition(":")
    model: Model = getattr(importlib.import_module(module_name), class_name)(config, weights, ops)
    _check_unread(config, weights.unread())
    return model


def _check_unread(config: ModelConfig, unread: list[str]) -> None:
    """Refuses leftover tensors of layers that are computed; logs the others, which change nothing (draft layers after
    the last, other heads)."""
    unread = [name for name in unread if not _NO_WEIGHTS.search(name)]
    if not unread:
        return
    numbers = ((name, _LAYER_NUMBER.search(name)) for name in unread)
    inside = [name for name, found in numbers if found and int(found[1]) in config.layers]
    if inside:
        raise ModelError(
            f"{len(inside)} tensors are no part of architecture {config.architecture!r}, first {inside[0]!r}: "
            "the checkpoint is a variant that is not supported",
            param="model",
        )
    if config.stage is not None:
        return  # what other stages read is no news
    _logger.warning("%d tensors of the checkpoint are not used, first %s", len(unread), unread[0])
