"""Configurations of every family: as published checkpoints write them, in both of transformers' forms, and in GGUF.

That the numbers are read rightly for tiny models is shown by their logits in `tests/weights/test_families.py`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sonar.config import LayerKind, ModelConfig, RopeConfig
from sonar.errors import ModelError
from sonar.model_config import load_model_config
from sonar.model_config_gguf import _ARCHITECTURES
from sonar.model_config_hf import _FAMILIES
from sonar.model_source import ModelSource, resolve_model
from sonar.models.registry import MODELS
from tests.gguf_writing import quantized, write_gguf

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _load(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(resolve_model(str(folder)))


def test_llama3_as_published(tmp_path: Path) -> None:
    config = _load(
        tmp_path, {**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING, "tie_word_embeddings": True}
    )
    parameters = {name: value for name, value in LLAMA3_SCALING.items() if name != "rope_type"}
    assert config.rope == {FULL: RopeConfig(500000.0, 64, "llama3", parameters)}
    assert (config.architecture, config.dtype, config.head_dim) == ("llama", "bfloat16", 64)
    assert (config.bos_token_id, config.eos_token_ids) == (128000, (128001, 128008, 128009))
    assert config.tie_word_embeddings
    assert config.extra == {}


def test_both_forms_of_rope_settings_give_one_config(tmp_path: Path) -> None:
    older = _load(tmp_path, {**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING})
    newer = _load(tmp_path, {**LLAMA, "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0}})
    assert older == newer
    oldest = {"type" if name == "rope_type" else name: value for name, value in LLAMA3_SCALING.items()}
    assert _load(tmp_path, {**LLAMA, "rope_theta": 500000.0, "rope_scaling": oldest}) == older


def test_defaults_of_a_bare_llama(tmp_path: Path) -> None:
    bare = {
        name: LLAMA[name]
        for name in LLAMA
        if name.startswith(("model_type", "vocab", "hidden_size", "inter", "num", "max"))
    }
    del bare["num_key_value_heads"]
    config = _load(tmp_path, bare)
    assert config.num_kv_heads == 32
    assert config.rope == {FULL: RopeConfig(10000.0, 64)}
    assert (config.norm_eps, config.activation, config.dtype) == (1e-6, "silu", "float32")
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (None, (), False)


def test_generation_config_decides_what_ends(tmp_path: Path) -> None:
    assert _load(tmp_path, LLAMA, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert _load(tmp_path, LLAMA, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert _load(tmp_path, LLAMA, {}).eos_token_ids == (128001, 128008, 128009)


def test_biases(tmp_path: Path) -> None:
    config = _load(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert config.qkv_bias
    assert config.extra == {"o_proj_bias": 1.0, "mlp_bias": 1.0}


def test_mistral_window(tmp_path: Path) -> None:
    mistral = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    v1 = _load(tmp_path, {**mistral, "sliding_window": 4096})
    assert (v1.layer_kinds, v1.sliding_window) == ((SLIDING,) * 4, 4096)
    assert v1.rope == {SLIDING: RopeConfig(10000.0, 64)}
    v3 = _load(tmp_path, {**mistral, "sliding_window": None, "head_dim": 128})
    assert (v3.layer_kinds, v3.sliding_window, v3.head_dim) == ((FULL,) * 4, 0, 128)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_window(tmp_path: Path, family: str) -> None:
    qwen = {**LLAMA, "model_type": family, "architectures": None, "sliding_window": 1024, "max_window_layers": 3}
    off = _load(tmp_path, {**qwen, "use_sliding_window": False})
    assert (off.layer_kinds, off.sliding_window) == ((FULL,) * 4, 0)
    on = _load(tmp_path, {**qwen, "use_sliding_window": True})
    assert (on.layer_kinds, on.sliding_window) == ((FULL, FULL, FULL, SLIDING), 1024)
    kinds = ["sliding_attention", "full_attention"] * 2
    listed = _load(tmp_path, {**qwen, "use_sliding_window": True, "layer_types": kinds})
    assert listed.layer_kinds == (SLIDING, FULL) * 2
    assert on.qkv_bias == (family == "qwen2")
    assert on.head_dim == (64 if family == "qwen2" else 128)


def test_yarn_reaches_further(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = _load(tmp_path, {**LLAMA, "model_type": "qwen2", "max_position_embeddings": 32768, "rope_scaling": yarn})
    assert config.max_position == 131072
    rope = config.rope[FULL]
    assert (rope.scaling, rope.parameters) == ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32768.0})
    del yarn["original_max_position_embeddings"]
    config = _load(tmp_path, {**LLAMA, "model_type": "qwen2", "max_position_embeddings": 32768, "rope_scaling": yarn})
    assert config.rope[FULL] == rope


GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "eos_token_id": [1, 106],
    "dtype": "bfloat16",
}


def test_gemma3_text(tmp_path: Path) -> None:
    config = _load(tmp_path, GEMMA3)
    assert config.layer_kinds == (SLIDING,) * 5 + (FULL, SLIDING)
    assert config.rope == {FULL: RopeConfig(1_000_000.0, 256), SLIDING: RopeConfig(10_000.0, 256)}
    assert (config.architecture, config.activation) == ("gemma3_text", "gelu_pytorch_tanh")
    assert config.tie_word_embeddings
    assert config.extra == {"query_pre_attn_scalar": 256.0}
    pattern = _load(tmp_path, {**GEMMA3, "sliding_window_pattern": 2, "final_logit_softcapping": 30.0})
    assert pattern.layer_kinds == (SLIDING, FULL, SLIDING, FULL, SLIDING, FULL, SLIDING)
    assert pattern.extra["final_logit_softcapping"] == 30.0


def test_gemma3_multimodal_nests_its_text(tmp_path: Path) -> None:
    """4B and above: settings are in text_config, some are left to defaults, full layers are scaled."""
    text = {
        name: value
        for name, value in GEMMA3.items()
        if name not in ("eos_token_id", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }
    scaled = {**text, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    config = _load(tmp_path, {**outer, "text_config": scaled, "vision_config": {}})
    assert config.rope[FULL] == RopeConfig(1_000_000.0, 256, "linear", {"factor": 8.0})
    assert config.rope[SLIDING] == RopeConfig(10_000.0, 256)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert config.eos_token_ids == (1, 106)
    newer = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert _load(tmp_path, {**outer, "text_config": {**text, "rope_parameters": newer}}) == config


def test_phi3(tmp_path: Path) -> None:
    phi3 = {
        **LLAMA,
        "model_type": "phi3",
        "sliding_window": 2047,
        "rope_scaling": None,
        "original_max_position_embeddings": 4096,
    }
    config = _load(tmp_path, phi3)
    assert (config.layer_kinds, config.sliding_window) == ((SLIDING,) * 4, 2047)
    partial = _load(tmp_path, {**phi3, "partial_rotary_factor": 0.75, "sliding_window": None})
    assert partial.rope == {FULL: RopeConfig(10000.0, 48)}
    for scaling in ("longrope", "su", "yarn"):
        settings = {"type": scaling, "factor": 32.0, "short_factor": [1.0] * 32, "long_factor": [1.0] * 32}
        with pytest.raises(ModelError, match="not supported"):
            _load(tmp_path, {**phi3, "rope_scaling": settings})


def test_gpt2(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
    )
    assert (config.hidden_size, config.intermediate_size, config.head_dim, config.max_position) == (768, 3072, 64, 1024)
    assert (config.rope, config.norm_eps, config.activation) == ({}, 1e-5, "gelu_new")
    assert config.tie_word_embeddings
    assert config.qkv_bias
    assert config.extra == {}


def test_what_is_read_can_be_built() -> None:
    assert {*_FAMILIES} - {"gemma3"} == {*MODELS}
    assert {*_ARCHITECTURES.values()} <= {*MODELS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba' is not supported; supported are llama, mistral, qwen2"),
        ({"model_type": None}, r"'model_type' is missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"generates no text"),
        ({"architectures": 1}, r"'architectures' is '1'; needed is a list"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization 'awq' is not supported.*GGUF"),
        ({"hidden_size": None}, r"'hidden_size' is missing"),
        ({"hidden_size": "2048"}, r"'hidden_size' is '2048'"),
        ({"num_hidden_layers": 0}, r"'num_hidden_layers' is '0'; needed is an integer from 1 to 10000"),
        ({"num_hidden_layers": 2**40}, r"'num_hidden_layers' is '1099511627776'"),
        ({"rms_norm_eps": float("inf")}, r"'rms_norm_eps' is 'inf'; needed is a finite number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("nan")}}, r"'factor' is 'nan'"),
        ({"num_attention_heads": True}, r"'num_attention_heads' is 'True'"),
        ({"num_key_value_heads": 5}, r"num_heads=32 is no multiple of num_kv_heads=5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"'dynamic' is not supported; .* default"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, r"'low_freq_factor' is missing"),
        ({"rope_scaling": "linear"}, r"'rope_scaling' is 'linear'; needed is an object"),
        ({"partial_rotary_factor": 0.01}, r"partial_rotary_factor=0\.01"),
        ({"torch_dtype": "float8_e4m3fn"}, r"'torch_dtype' is 'float8.*one of float32, bfloat16"),
        ({"eos_token_id": "</s>"}, r"'eos_token_id' is '</s>'"),
        ({"model_type": "mistral", "sliding_window": 0}, r"'sliding_window' is '0'"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, r"'layer_types'.*a list of 4"),
    ],
)  # fmt: skip
def test_refusals_name_field_value_and_what_is_known(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        _load(tmp_path, {**LLAMA, **change})
    assert "config.json" in raised.value.message


WRITTEN = {
    "llama": {**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING, "attention_bias": False},
    "qwen2": {**LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "use_sliding_window": True,
              "sliding_window": 64, "max_window_layers": 2},
    "gemma3": {"text_config": GEMMA3},
    "phi3": {**LLAMA, "sliding_window": 64, "partial_rotary_factor": 0.5},
    "gpt2": {"vocab_size": 5, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 4, "layer_norm_epsilon": 1e-5},
}  # fmt: skip
ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([2**40, 10**400, 1e308, float("inf"), float("nan"), "", "x", [], [1], {}, {"type": "yarn"}]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_value_in_any_field_is_a_model_error_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(WRITTEN)))
    config = copy.deepcopy({"model_type": family, **{k: v for k, v in WRITTEN[family].items() if k != "model_type"}})
    place = config
    for _ in range(2):
        name = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[name], dict) or not place[name]:
            break
        place = place[name]
        name = data.draw(st.sampled_from(sorted(place)))
    place[name] = data.draw(ODD_VALUES)
    try:
        _load(tmp_path, config)
    except ModelError as error:
        assert "config.json" in str(error)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_damaged_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match="JSON"):
        load_model_config(resolve_model(str(tmp_path)))


def test_demo_model(smollm2: ModelSource) -> None:
    config = load_model_config(smollm2)
    assert (config.architecture, config.quantization, config.dtype) == ("llama", "Q4_1", "float32")
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.max_position, config.norm_eps, config.vocab_size) == (8192, 1e-5, 49152)
    assert config.rope == {FULL: RopeConfig(100000.0, 64)}
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.tie_word_embeddings


GGUF_QWEN = {
    "qwen2.context_length": 4096,
    "qwen2.embedding_length": 256,
    "qwen2.block_count": 2,
    "qwen2.feed_forward_length": 512,
    "qwen2.attention.head_count": 4,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
    "tokenizer.ggml.tokens": ["a", "<|endoftext|>", "<|im_end|>", "b"],
    "tokenizer.ggml.token_type": [1, 3, 3, 1],
    "tokenizer.ggml.eos_token_id": 2,
}


def _load_gguf(
    path: Path, change: dict[str, Any] | None = None, embedding: str = "Q4_K", architecture: str = "qwen2"
) -> ModelConfig:
    values = {key: value for key, value in {**GGUF_QWEN, **(change or {})}.items() if value is not None}
    tensors = {
        "token_embd.weight": (quantized((4, 256), embedding), embedding),
        "output_norm.weight": (np.ones(256, dtype=np.float32), "F32"),
    }
    return load_model_config(resolve_model(str(write_gguf(path / "m.gguf", architecture, values, tensors))))


def test_gguf_defaults_and_end_ids(tmp_path: Path) -> None:
    config = _load_gguf(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 64, 4)
    assert config.rope == {FULL: RopeConfig(10000.0, 64)}
    assert config.eos_token_ids == (2, 1), "the stated one, then control tokens that end a text by their name"
    assert (config.quantization, config.dtype, config.tie_word_embeddings) == ("Q4_K", "float32", True)
    assert _load_gguf(tmp_path, {"tokenizer.ggml.unknown_token_id": 1}).eos_token_ids == (2,)
    assert _load_gguf(tmp_path, {"qwen2.attention.sliding_window": 128}).sliding_window == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qwen2.block_count": None}, r"'qwen2\.block_count' is missing"),
        ({"qwen2.attention.head_count": [4, 4]}, r"'qwen2\.attention\.head_count'"),
        ({"qwen2.rope.scaling.type": "longrope"}, r"'longrope' is not supported; supported in GGUF files are none"),
        ({"qwen2.expert_count": 8}, r"mixture-of-experts"),
        ({"split.count": 3}, r"one of several parts; merge them"),
    ],
)
def test_gguf_refusals(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _load_gguf(tmp_path, change)


def test_gguf_of_other_architectures_and_quantizations(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'rwkv7' is not supported; supported in GGUF files are llama, qwen2"):
        _load_gguf(tmp_path, architecture="rwkv7")
    with pytest.raises(ModelError, match=r"'token_embd\.weight' has the quantization IQ4_XS.*supported are F32, F16"):
        _load_gguf(tmp_path, embedding="IQ4_XS")
