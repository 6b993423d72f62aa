"""What `load_model` refuses, and that the registry can be read without torch."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys

import pytest
import torch

from sonar.errors import ModelError
from sonar.model_config_hf import read_hf_config
from sonar.models.registry import MODELS, load_model
from sonar.ops.registry import select_ops
from tests.models.dict_weights import DictWeights
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    model = make_tiny_model("llama")
    folder = tmp_path_factory.mktemp("llama")
    model.config.save_pretrained(folder)
    return read_hf_config(folder), model


@pytest.fixture(scope="module")
def ops():
    return select_ops(torch.device("cpu"), torch.float32, "reference")


def test_unknown_architecture_lists_what_is_known(llama, ops) -> None:
    config = dataclasses.replace(llama[0], architecture="mamba")
    with pytest.raises(ModelError, match=r"'mamba' is not supported; known are .*gpt2, gpt_oss, llama") as caught:
        load_model(config, DictWeights(llama[1], torch.float32), ops)
    assert caught.value.code == "unsupported_architecture"


def test_missing_tensor_is_named(llama, ops) -> None:
    weights = DictWeights(llama[1], torch.float32)
    del weights.tensors["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(llama[0], weights, ops)


def test_checkpoint_of_a_variant_is_refused(llama, ops) -> None:
    weights = DictWeights(llama[1], torch.float32)
    weights.tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(16)
    with pytest.raises(ModelError, match=r"first 'model\.layers\.1\.self_attn\.q_norm\.weight'"):
        load_model(llama[0], weights, ops)


def test_harmless_leftovers_load(llama, ops, caplog: pytest.LogCaptureFixture) -> None:
    weights = DictWeights(llama[1], torch.float32)
    weights.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    with caplog.at_level(logging.WARNING, "sonar.models.registry"):
        load_model(llama[0], weights, ops)
    assert not caplog.records
    weights.tensors["model.layers.4.self_attn.q_proj.weight"] = torch.ones(1)
    with caplog.at_level(logging.WARNING, "sonar.models.registry"):
        load_model(llama[0], weights, ops)
    assert "model.layers.4.self_attn.q_proj.weight" in caplog.text


def test_unknown_activation_lists_what_is_known(llama, ops) -> None:
    config = dataclasses.replace(llama[0], activation="relu2")
    with pytest.raises(ModelError, match=r"'relu2' is not supported; known are .*'silu'"):
        load_model(config, DictWeights(llama[1], torch.float32), ops)


def test_long_rope_of_phi3_files_is_refused(ops, tmp_path) -> None:
    model = make_tiny_model("phi3")
    model.config.save_pretrained(tmp_path)
    weights = DictWeights(model, torch.float32)
    weights.tensors["rope_factors_long.weight"] = torch.ones(4)
    with pytest.raises(ModelError, match="longrope"):
        load_model(read_hf_config(tmp_path), weights, ops)


def test_every_entry_names_a_class() -> None:
    for name in MODELS:
        module, _, attribute = MODELS[name].partition(":")
        __import__(module)
        assert isinstance(getattr(sys.modules[module], attribute), type)


def test_names_can_be_read_without_torch() -> None:
    code = "import sys, sonar.models.registry, sonar.ops.draw_key; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
