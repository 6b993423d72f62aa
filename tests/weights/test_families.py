"""Every family from its files: config, weights and model put together give transformers' logits, and nothing is left
unread. From safetensors, from GGUF, and finite ones from random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sonar.config import ModelConfig
from sonar.model_config import load_model_config
from sonar.model_source import ModelSource, resolve_model
from sonar.models.base import WeightSource
from sonar.models.registry import load_model
from sonar.ops.registry import select_ops
from sonar.weights.open_weights import open_weights
from tests.gguf_writing import GGUF_FAMILIES, write_gguf_model
from tests.models.paged_runner import PagedRunner
from tests.tiny import FAMILIES, make_tiny_model

CPU = torch.device("cpu")
PROMPT = [(37 * position + 11) % 512 for position in range(16)]  # shorter than every window: GGUF lacks qwen2's


class Case(NamedTuple):
    """A family's transformers model and its logits_TV of the prompt."""

    family: str
    reference: PreTrainedModel
    expected_TV: Tensor


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return _make_case(request.param)


@pytest.fixture(scope="module", params=GGUF_FAMILIES)
def gguf_case(request: pytest.FixtureRequest) -> Case:
    return _make_case(request.param)


def _make_case(family: str) -> Case:
    torch.set_num_threads(1)
    reference = make_tiny_model(family)
    with torch.inference_mode():
        return Case(family, reference, reference(torch.tensor([PROMPT])).logits[0])


def _logits(config: ModelConfig, weights: WeightSource) -> Tensor:
    model = load_model(config, weights, select_ops(CPU, torch.float32, "reference"))
    return PagedRunner(model, config, torch.float32).step([(0, PROMPT)])[0]


def _open(source: ModelSource, config: ModelConfig) -> WeightSource:
    return open_weights(source, config, "auto", torch.float32, CPU)


def test_safetensors_folder(case: Case, tmp_path: Path) -> None:
    case.reference.save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))
    config = load_model_config(source)
    weights = _open(source, config)
    torch.testing.assert_close(_logits(config, weights), case.expected_TV, atol=1e-4, rtol=0)
    assert weights.unread() == []


def test_sharded_folder(case: Case, tmp_path: Path) -> None:
    case.reference.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    source = resolve_model(str(tmp_path))
    config = load_model_config(source)
    torch.testing.assert_close(_logits(config, _open(source, config)), case.expected_TV, atol=1e-4, rtol=0)


def test_gguf_file(gguf_case: Case, tmp_path: Path) -> None:
    case = gguf_case
    source = resolve_model(str(write_gguf_model(case.family, case.reference, tmp_path / "model.gguf")))
    config = load_model_config(source)
    match case.family:  # what these files cannot state
        case "gemma3":
            assert config.extra["query_pre_attn_scalar"] == config.head_dim
            config = replace(config, extra={**config.extra, "query_pre_attn_scalar": 20.0})
        case "gpt2":
            config = replace(config, extra={"scale_attn_by_inverse_layer_idx": 1.0})
    weights = _open(source, config)
    torch.testing.assert_close(_logits(config, weights), case.expected_TV, atol=1e-4, rtol=0)
    assert weights.unread() == []


def test_gguf_and_folder_give_one_config(gguf_case: Case, tmp_path: Path) -> None:
    case = gguf_case
    case.reference.save_pretrained(tmp_path)
    folder = load_model_config(resolve_model(str(tmp_path)))
    file = load_model_config(resolve_model(str(write_gguf_model(case.family, case.reference, tmp_path / "m.gguf"))))
    assert file.architecture == ("llama" if case.family == "mistral" else folder.architecture)
    same = ["vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"]
    same += ["max_position", "activation", "norm_eps", "tie_word_embeddings", "dtype", "quantization", "qkv_bias"]
    if case.family not in ("mistral", "qwen2"):
        same += ["layer_kinds", "sliding_window"]
    if case.family not in ("mistral", "qwen2", "llama"):
        same.append("rope")
    for name in same:
        assert getattr(file, name) == getattr(folder, name), name


def test_dummy_weights_stay_finite(case: Case, tmp_path: Path) -> None:
    case.reference.save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))
    config = load_model_config(source)
    weights = open_weights(source, config, "dummy", torch.float32, CPU)
    logits_TV = _logits(config, weights)
    assert torch.isfinite(logits_TV).all()
    assert 0.01 < logits_TV.std() < 100
    again = open_weights(source, config, "dummy", torch.float32, CPU)
    assert torch.equal(logits_TV, _logits(config, again)), "weights must be the same at every start"


def test_dummy_weights_know_what_a_checkpoint_would_have(case: Case, tmp_path: Path) -> None:
    case.reference.save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))
    config = load_model_config(source)
    dummy, real = open_weights(source, config, "dummy", torch.float32, CPU), _open(source, config)
    kinds = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    prefix = "transformer.h.0." if case.family == "gpt2" else "model.layers.0."
    names = [f"{prefix}{kind}.bias" for kind in kinds] if case.family != "gpt2" else [f"{prefix}attn.c_attn.bias"]
    for name in [*names, "lm_head.weight", "rope_freqs.weight"]:
        if case.family == "phi3" and ".mlp.up" in name:
            continue
        assert dummy.has(name) == real.has(name), name
