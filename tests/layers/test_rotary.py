"""Rotary tables against transformers' own frequencies and tables."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sonar.config import RopeConfig
from sonar.errors import ModelError
from sonar.layers.rotary import attention_factor, build_cos_sin, inverse_frequencies

HEAD_DIM = 48
CPU = torch.device("cpu")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048.0}
SCALINGS = {
    "linear": ("linear", {"factor": 2.5}),
    "llama3": ("llama3", LLAMA3),
    "llama3_32": ("llama3", {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 300.0}),
    "yarn": ("yarn", YARN),
    "yarn_betas": ("yarn", {**YARN, "beta_fast": 24.0, "beta_slow": 2.0}),
    "yarn_untruncated": ("yarn", {**YARN, "truncate": 0.0}),
    "yarn_given_factor": ("yarn", {**YARN, "attention_factor": 0.7}),
    "yarn_mscale": ("yarn", {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2}),
    "yarn_below_one": ("yarn", {**YARN, "factor": 0.5}),
    "yarn_short_context": ("yarn", {**YARN, "original_max_position_embeddings": 8.0}),
}


def _transformers_config(name: str, theta: float) -> transformers.LlamaConfig:
    scaling, parameters = SCALINGS[name]
    written = {key: bool(value) if key == "truncate" else value for key, value in parameters.items()}
    return transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": scaling, "rope_theta": theta, **written},
    )


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_equal_transformers(name: str, theta: float) -> None:
    scaling, parameters = SCALINGS[name]
    rope = RopeConfig(theta, HEAD_DIM, scaling, parameters)
    expected_X, expected_factor = ROPE_INIT_FUNCTIONS[scaling](_transformers_config(name, theta), CPU)
    torch.testing.assert_close(inverse_frequencies(rope), expected_X, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(expected_factor, rel=1e-7)


@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_table_equals_transformers_to_the_last_position(name: str) -> None:
    scaling, parameters = SCALINGS[name]
    table_PR = build_cos_sin(RopeConfig(10_000.0, HEAD_DIM, scaling, parameters), 16384, CPU)
    embedding = LlamaRotaryEmbedding(_transformers_config(name, 10_000.0))
    cos, sin = embedding(torch.zeros(1), torch.arange(16384).unsqueeze(0))
    half = HEAD_DIM // 2
    torch.testing.assert_close(table_PR[:, :half], cos[0, :, :half], atol=2e-6, rtol=0)
    torch.testing.assert_close(table_PR[:, half:], sin[0, :, half:], atol=2e-6, rtol=0)


def test_plain_table_is_cosines_then_sines() -> None:
    table_PR = build_cos_sin(RopeConfig(100.0, 4), 3, CPU)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    torch.testing.assert_close(table_PR, torch.cat((angles.cos(), angles.sin()), dim=1))


def test_frequency_factors_divide() -> None:
    factors_X = torch.tensor([1.0, 8.0])
    table_PR = build_cos_sin(RopeConfig(100.0, 4), 3, CPU, factors_X)
    assert table_PR[1, 2:].tolist() == pytest.approx([0.841471, 0.0124997], rel=1e-5)


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_missing_parameter_is_named(scaling: str) -> None:
    with pytest.raises(ModelError, match=f"'{scaling}' lacks 'factor'"):
        inverse_frequencies(RopeConfig(10_000.0, 8, scaling))
