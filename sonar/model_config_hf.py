"""`config.json` and `generation_config.json` of a Hugging Face folder -> `ModelConfig`.

Field names and their defaults are those of each family's configuration class in transformers; both its version 5 form
(`rope_parameters`) and the older one (`rope_theta`, `rope_scaling`) are read. Called by `sonar.model_config`.
Torch-free.

What `ModelConfig.extra` holds (a flag is 1.0; absent when the model does without):
    query_pre_attn_scalar, attn_logit_softcapping, final_logit_softcapping   gemma3_text
    scale_attn_weights (0.0 when off), scale_attn_by_inverse_layer_idx       gpt2
    o_proj_bias, mlp_bias                                                    llama; the first in qwen3, qwen3_moe too
    swiglu_alpha, swiglu_limit                                               gpt_oss
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sonar.config import LayerKind, ModelConfig, RopeConfig
from sonar.config_fields import MAX_LAYERS, Fields
from sonar.errors import ConfigError, ModelError
from sonar.model_config_moe import (
    read_deepseek_experts,
    read_gpt_oss_experts,
    read_latent_attention,
    read_mixtral_experts,
    read_qwen_experts,
)
from sonar.rope_fields import read_rope, yarn_reach

_SERVED_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_DTYPES = ("float32", "bfloat16", "float16")
_LAYER_KINDS = {"full_attention": LayerKind.FULL, "sliding_attention": LayerKind.SLIDING}


def read_hf_config(folder: Path) -> ModelConfig:
    """The configuration of the model in `folder`. Raises ModelError as `load_model_config`."""
    fields = _read_json(folder / "config.json")
    model_type = fields.get_str("model_type")
    if model_type not in _FAMILIES:
        raise ModelError(
            f"{fields.where}: architecture {model_type!r} is not supported; supported are {', '.join(_FAMILIES)}",
            param="model",
        )
    _refuse_other_heads(fields)
    _refuse_quantization(fields)
    generation = folder / "generation_config.json"
    eos_token_ids = _token_ids(_read_json(generation)) if generation.is_file() else ()
    try:
        return _FAMILIES[model_type](fields, eos_token_ids)
    except ConfigError as error:
        raise ModelError(f"{fields.where}: {error.message}", param="model") from error


def _read_json(path: Path) -> Fields:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}", param="model") from error
    except ValueError as error:
        raise ModelError(f"{path} is no valid JSON ({error}); fetch it again", param="model") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no JSON object; fetch it again", param="model")
    return Fields(values, str(path))


def _refuse_other_heads(fields: Fields) -> None:
    """Models with a classifier or an embedding head share the family's model_type; they generate nothing."""
    names = fields.raw("architectures") or []
    if not isinstance(names, list):
        raise fields.wrong("architectures", "a list of names")
    if names and not any(str(name).endswith(_SERVED_SUFFIXES) for name in names):
        raise ModelError(f"{fields.where}: {names[0]} generates no text; give a causal language model", param="model")


def _refuse_quantization(fields: Fields) -> None:
    settings = fields.raw("quantization_config")
    if settings is not None:
        method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
        if method == "mxfp4" and fields.raw("model_type") == "gpt_oss":
            return
        raise ModelError(
            f"{fields.where}: quantization {method!r} is not supported; give the unquantized model (float32, bfloat16 "
            "or float16) or a GGUF file",
            param="model",
        )


def _token_ids(fields: Fields) -> tuple[int, ...]:
    """`eos_token_id`: absent, one id or a list."""
    value = fields.raw("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise fields.wrong("eos_token_id", "a token id or a list of them")
    return tuple(ids)


def _common(fields: Fields, eos_token_ids: tuple[int, ...], *, tied: bool = False) -> dict[str, Any]:
    """Arguments of `ModelConfig` that most families name alike. tied: the family's default."""
    num_heads, hidden_size = fields.get_int("num_attention_heads"), fields.get_int("hidden_size")
    num_layers = fields.get_int("num_hidden_layers", high=MAX_LAYERS)
    return {
        "vocab_size": fields.get_int("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.get_int("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.get_int("num_key_value_heads", num_heads),
        "head_dim": fields.get_int("head_dim", max(1, hidden_size // num_heads)),
        "max_position": fields.get_int("max_position_embeddings"),
        "norm_eps": fields.get_float("rms_norm_eps", 1e-6),
        "activation": fields.get_str("hidden_act", "silu"),
        "layer_kinds": (LayerKind.FULL,) * num_layers,
        "tie_word_embeddings": fields.get_bool("tie_word_embeddings", tied),
        "bos_token_id": None if fields.raw("bos_token_id") is None else fields.get_int("bos_token_id", low=0),
        "eos_token_ids": eos_token_ids or _token_ids(fields),
        "dtype": _dtype(fields),
    }


def _dtype(fields: Fields) -> str:
    """Of the stored weights; transformers 5 calls it `dtype`, older versions `torch_dtype`."""
    name = "torch_dtype" if fields.raw("dtype") is None else "dtype"
    dtype = fields.get_str(name, "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise fields.wrong(name, f"one of {', '.join(_DTYPES)}")
    return dtype


def _set_rope(fields: Fields, arguments: dict[str, Any]) -> None:
    """Give the layers the rotary settings of a family that has one kind of them. YaRN reaches beyond max_position."""
    written = fields.nested("rope_parameters") if fields.raw("rope_parameters") else fields.nested("rope_scaling")
    rope = read_rope(written, fields, head_dim=arguments["head_dim"], theta=10_000.0)
    arguments["rope"] = dict.fromkeys(arguments["layer_kinds"], rope)
    if rope.scaling == "yarn":
        arguments["max_position"] = max(arguments["max_position"], yarn_reach(rope))


def _listed_kinds(fields: Fields, num_layers: int) -> tuple[LayerKind, ...] | None:
    """`layer_types`, if it is written."""
    names = fields.raw("layer_types")
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != num_layers or not set(names) <= set(_LAYER_KINDS):
        raise fields.wrong("layer_types", f"a list of {num_layers} out of {', '.join(_LAYER_KINDS)}")
    return tuple(_LAYER_KINDS[name] for name in names)


def _set_window(fields: Fields, arguments: dict[str, Any], kinds: tuple[LayerKind, ...]) -> None:
    """Give the layers their kinds, and the window if one slides."""
    arguments["layer_kinds"] = kinds
    if LayerKind.SLIDING in kinds:
        arguments["sliding_window"] = fields.get_int("sliding_window")


def _llama(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    arguments = _common(fields, eos_token_ids)
    has_bias = fields.get_bool("attention_bias", False)
    extra = {"o_proj_bias": has_bias, "mlp_bias": fields.get_bool("mlp_bias", False)}
    _set_rope(fields, arguments)
    return ModelConfig("llama", **arguments, qkv_bias=has_bias, extra=_flags(extra))


def _mistral(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    arguments = _common(fields, eos_token_ids)
    num_layers = arguments["num_layers"]
    all_layers = LayerKind.FULL if fields.raw("sliding_window") is None else LayerKind.SLIDING
    _set_window(fields, arguments, _listed_kinds(fields, num_layers) or (all_layers,) * num_layers)
    _set_rope(fields, arguments)
    return ModelConfig("mistral", **arguments)


def _qwen_kinds(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """qwen2 and qwen3: the window is off unless `use_sliding_window`, and then begins at `max_window_layers`."""
    if not fields.get_bool("use_sliding_window", False) or fields.raw("sliding_window") is None:
        return (LayerKind.FULL,) * num_layers
    first = fields.get_int("max_window_layers", 28, low=0)
    kinds = tuple(LayerKind.SLIDING if i >= first else LayerKind.FULL for i in range(num_layers))
    return _listed_kinds(fields, num_layers) or kinds


def _qwen2(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    arguments = _common(fields, eos_token_ids)
    _set_window(fields, arguments, _qwen_kinds(fields, arguments["num_layers"]))
    _set_rope(fields, arguments)
    return ModelConfig("qwen2", **arguments, qkv_bias=True)


def _qwen3(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    arguments = {**_common(fields, eos_token_ids), "head_dim": fields.get_int("head_dim", 128)}
    _set_window(fields, arguments, _qwen_kinds(fields, arguments["num_layers"]))
    has_bias = fields.get_bool("attention_bias", False)
    _set_rope(fields, arguments)
    return ModelConfig("qwen3", **arguments, qkv_bias=has_bias, extra=_flags({"o_proj_bias": has_bias}))


def _mixtral(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    dense = _mistral(fields, eos_token_ids)
    return replace(dense, architecture="mixtral", moe=read_mixtral_experts(fields))


def _qwen2_moe(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    dense = _qwen2(fields, eos_token_ids)
    has_bias = fields.get_bool("qkv_bias", True)
    moe = read_qwen_experts(fields, has_shared=True)
    return replace(dense, architecture="qwen2_moe", qkv_bias=has_bias, moe=moe)


def _qwen3_moe(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Its head_dim has no default of its own."""
    num_heads = fields.get_int("num_attention_heads")
    head_dim = fields.get_int("head_dim", max(1, fields.get_int("hidden_size") // num_heads))
    dense = _qwen3(Fields({**fields.values, "head_dim": head_dim}, fields.where), eos_token_ids)
    return replace(dense, architecture="qwen3_moe", moe=read_qwen_experts(fields, has_shared=False))


def _gpt_oss(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    arguments = {**_common(fields, eos_token_ids), "head_dim": fields.get_int("head_dim", 64)}
    arguments["norm_eps"] = fields.get_float("rms_norm_eps", 1e-5)
    num_layers = arguments["num_layers"]
    kinds = tuple(LayerKind.FULL if i % 2 else LayerKind.SLIDING for i in range(num_layers))
    _set_window(fields, arguments, _listed_kinds(fields, num_layers) or kinds)
    _set_rope(fields, arguments)
    extra = {
        "swiglu_alpha": fields.get_float("swiglu_alpha", 1.702),
        "swiglu_limit": fields.get_float("swiglu_limit", 7.0),
    }
    return ModelConfig(
        "gpt_oss",
        **arguments,
        qkv_bias=fields.get_bool("attention_bias", True),
        quantization=None if fields.raw("quantization_config") is None else "mxfp4",
        extra=extra,
        moe=read_gpt_oss_experts(fields),
    )


def _deepseek_v2(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    return _deepseek(fields, eos_token_ids, is_v3=False)


def _deepseek_v3(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    return _deepseek(fields, eos_token_ids, is_v3=True)


def _deepseek(fields: Fields, eos_token_ids: tuple[int, ...], *, is_v3: bool) -> ModelConfig:
    """Every head has its own keys and values, so `num_key_value_heads` says nothing; `head_dim` means the rotated
    dimensions here."""
    if fields.get_bool("mlp_bias", False):
        raise ModelError(f"{fields.where}: mlp_bias is not supported in this family", param="model")
    mla = read_latent_attention(fields, is_v3=is_v3)
    arguments = {**_common(fields, eos_token_ids), "head_dim": mla.qk_rope_head_dim}
    _set_rope(fields, arguments)
    arguments["head_dim"] = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    arguments["num_kv_heads"] = arguments["num_heads"]
    return ModelConfig(
        "deepseek_v3" if is_v3 else "deepseek_v2",
        **arguments,
        qkv_bias=fields.get_bool("attention_bias", False),
        moe=read_deepseek_experts(fields, is_v3=is_v3),
        mla=mla,
    )


def _phi3(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    arguments = _common(fields, eos_token_ids)
    num_layers = arguments["num_layers"]
    all_layers = LayerKind.FULL if fields.raw("sliding_window") is None else LayerKind.SLIDING
    _set_window(fields, arguments, (all_layers,) * num_layers)
    _set_rope(fields, arguments)
    if any(rope.scaling != "none" for rope in arguments["rope"].values()):  # what phi3 calls "yarn" or "su" is LongRoPE
        raise ModelError(f"{fields.where}: phi3 with a rope scaling (LongRoPE) is not supported", param="model")
    return ModelConfig("phi3", **arguments)


def _gemma3(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The text model, whose settings a multimodal checkpoint nests in `text_config`."""
    if fields.raw("text_config") is not None:
        outer_ids = eos_token_ids or _token_ids(fields)
        return _gemma3(fields.nested("text_config"), outer_ids)
    if fields.get_bool("use_bidirectional_attention", False):
        raise ModelError(f"{fields.where}: use_bidirectional_attention is not supported", param="model")
    defaults = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "sliding_window": 4096,
        "hidden_act": fields.get_str("hidden_activation", "gelu_pytorch_tanh"),
    }
    written = {name: value for name, value in fields.values.items() if value is not None}
    fields = Fields({**defaults, **written}, fields.where)
    arguments = _common(fields, eos_token_ids, tied=True)
    num_layers = arguments["num_layers"]
    pattern = fields.get_int("sliding_window_pattern", 6)
    kinds = tuple(LayerKind.SLIDING if (i + 1) % pattern else LayerKind.FULL for i in range(num_layers))
    _set_window(fields, arguments, _listed_kinds(fields, num_layers) or kinds)
    extra = {"query_pre_attn_scalar": fields.get_float("query_pre_attn_scalar", 256.0)}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.raw(name) is not None:
            extra[name] = fields.get_float(name)
    return ModelConfig("gemma3_text", **arguments, rope=_gemma3_ropes(fields, arguments["head_dim"]), extra=extra)


def _gemma3_ropes(fields: Fields, head_dim: int) -> dict[LayerKind, RopeConfig]:
    """Full layers rotate slowly and may be scaled; sliding layers have a base of their own and no scaling."""
    nested = fields.nested("rope_parameters")
    full, sliding = nested.nested("full_attention"), nested.nested("sliding_attention")
    if not full.values:
        full = fields.nested("rope_scaling")
    local_theta = fields.get_float("rope_local_base_freq", 10_000.0)
    no_theta = Fields({}, fields.where)  # `rope_theta` outside of rope_parameters is that of the full layers
    return {
        LayerKind.FULL: read_rope(full, fields, head_dim=head_dim, theta=1_000_000.0),
        LayerKind.SLIDING: read_rope(sliding, no_theta, head_dim=head_dim, theta=local_theta),
    }


def _gpt2(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Other names, learned positions, LayerNorm, biases everywhere."""
    if fields.get_bool("add_cross_attention", False):
        raise ModelError(f"{fields.where}: add_cross_attention is not supported", param="model")
    hidden_size = fields.get_int("n_embd")
    renamed = {
        "num_attention_heads": fields.raw("n_head"),
        "hidden_size": hidden_size,
        "num_hidden_layers": fields.raw("n_layer"),
        "intermediate_size": fields.get_int("n_inner", 4 * hidden_size),
        "max_position_embeddings": fields.raw("n_positions"),
        "rms_norm_eps": fields.get_float("layer_norm_epsilon", 1e-5),
        "hidden_act": fields.get_str("activation_function", "gelu_new"),
    }
    fields = Fields({**fields.values, **renamed}, fields.where)
    extra = _flags({"scale_attn_by_inverse_layer_idx": fields.get_bool("scale_attn_by_inverse_layer_idx", False)})
    if not fields.get_bool("scale_attn_weights", True):
        extra["scale_attn_weights"] = 0.0
    arguments = _common(fields, eos_token_ids, tied=True)
    return ModelConfig("gpt2", **arguments, rope={}, qkv_bias=True, extra=extra)


def _flags(values: dict[str, bool]) -> dict[str, float]:
    """`extra` entries for what is on."""
    return {name: 1.0 for name, value in values.items() if value}


_FAMILIES: dict[str, Callable[[Fields, tuple[int, ...]], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
