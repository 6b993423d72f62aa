"""Safetensors: what comes out, and a named error for every way the files can be wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from sonar.config import LayerKind, ModelConfig, RopeConfig
from sonar.errors import ModelError
from sonar.ops.table import PlainMatrix
from sonar.weights.safetensors_file import SafetensorsFile
from sonar.weights.safetensors_weights import SafetensorsWeights

TENSORS = {
    "model.embed_tokens.weight": torch.arange(24.0).reshape(6, 4),
    "model.layers.0.self_attn.q_proj.weight": torch.arange(8).reshape(2, 4).bfloat16(),
    "model.layers.0.self_attn.q_proj.bias": torch.tensor([1.5, -2.0]).half(),
    "model.norm.weight": torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16(),
    "model.layers.0.ids": torch.arange(3),
}


def config_of(architecture: str = "llama") -> ModelConfig:
    """A small configuration; only the architecture and the head counts matter here."""
    return ModelConfig(
        architecture=architecture,
        vocab_size=6,
        hidden_size=4,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        max_position=16,
        norm_eps=1e-5,
        activation="silu",
        layer_kinds=(LayerKind.FULL,),
        rope={LayerKind.FULL: RopeConfig(10000.0, 2)},
    )


def _open(folder: Path, architecture: str = "llama", dtype: torch.dtype = torch.float32) -> SafetensorsWeights:
    return SafetensorsWeights(folder, config_of(architecture), dtype, torch.device("cpu"))


def _write(folder: Path, tensors: Mapping[str, Tensor] = TENSORS) -> Path:
    path = folder / "model.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def _write_shards(folder: Path) -> dict[str, str]:
    names = list(TENSORS)
    shards = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for shard, members in shards.items():
        save_file({name: TENSORS[name] for name in members}, folder / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_matrices_as_stored_and_vectors_in_the_compute_dtype(tmp_path: Path) -> None:
    _write(tmp_path)
    weights = _open(tmp_path)
    matrix = weights.matrix("model.layers.0.self_attn.q_proj.weight", (2, 4))
    assert isinstance(matrix, PlainMatrix)
    assert matrix.weight_NK.dtype == torch.bfloat16
    assert torch.equal(matrix.weight_NK, TENSORS["model.layers.0.self_attn.q_proj.weight"])
    bias = weights.tensor("model.layers.0.self_attn.q_proj.bias", (2,))
    assert bias.dtype == torch.float32
    assert bias.tolist() == [1.5, -2.0]
    assert weights.has("model.norm.weight")
    assert not weights.has("lm_head.weight")
    assert sorted(weights.unread()) == ["model.embed_tokens.weight", "model.layers.0.ids", "model.norm.weight"]


def test_matrices_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    _write(tmp_path)
    weights = _open(tmp_path)
    name = "model.embed_tokens.weight"
    first, second = weights.matrix(name, (6, 4)), weights.matrix(name, (6, 4))
    assert isinstance(first, PlainMatrix)
    assert isinstance(second, PlainMatrix)
    assert first.weight_NK.data_ptr() == second.weight_NK.data_ptr()


def test_vectors_outlive_a_change_of_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path)
    bias = _open(tmp_path, dtype=torch.float16).tensor("model.layers.0.self_attn.q_proj.bias", (2,))
    path.write_bytes(bytes(path.stat().st_size))
    assert bias.tolist() == [1.5, -2.0]


def test_shards(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    weights = _open(tmp_path)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(weights.tensor(name, tuple(TENSORS[name].shape)), TENSORS[name].float())


def test_gpt2_is_turned_round_and_its_prefix_supplied(tmp_path: Path) -> None:
    """The published gpt2 has no `transformer.` before its names."""
    conv1d, plain = torch.arange(12.0).reshape(4, 3), torch.arange(8.0).reshape(2, 4)
    _write(tmp_path, {"h.0.attn.c_attn.weight": conv1d, "wte.weight": plain})
    weights = _open(tmp_path, "gpt2")
    matrix = weights.matrix("transformer.h.0.attn.c_attn.weight", (3, 4))
    assert isinstance(matrix, PlainMatrix)
    assert torch.equal(matrix.weight_NK, conv1d.T)
    assert matrix.weight_NK.is_contiguous()
    table = weights.matrix("transformer.wte.weight", (2, 4))
    assert isinstance(table, PlainMatrix)
    assert torch.equal(table.weight_NK, plain)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_multimodal_checkpoint(tmp_path: Path, prefix: str) -> None:
    tensors = {f"{prefix}norm.weight": torch.ones(4), f"{prefix}layers.0.mlp.up_proj.weight": torch.ones(2, 4)}
    vision = {"vision_tower.layers.0.w": torch.ones(1), "multi_modal_projector.w": torch.ones(1)}
    _write(tmp_path, {**tensors, **vision})
    weights = _open(tmp_path, "gemma3_text")
    assert weights.tensor("model.norm.weight", (4,)).tolist() == [1, 1, 1, 1]
    assert weights.unread() == ["model.layers.0.mlp.up_proj.weight"], "the vision part is nobody's business here"


def test_missing_misshapen_and_ill_typed_tensors_are_named(tmp_path: Path) -> None:
    _write(tmp_path)
    weights = _open(tmp_path)
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is missing"):
        weights.matrix("lm_head.weight", (6, 4))
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has shape \(4,\); config\.json needs \(8,\)"):
        weights.tensor("model.norm.weight", (8,))
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.ids' has type I64; supported are F32, BF16, F16"):
        weights.tensor("model.layers.0.ids", (3,))


def test_cut_file_names_the_tensor(tmp_path: Path) -> None:
    path = _write(tmp_path)
    data = path.read_bytes()
    last = max(SafetensorsFile(path).tensors.items(), key=lambda item: item[1].end)[0]
    path.write_bytes(data[:-3])
    with pytest.raises(ModelError, match=f"model.safetensors is cut short: tensor '{last}'"):
        _open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x10", "does not fit"),
        (b"\xff" * 16, "does not fit"),
        (b"\x05" + bytes(7) + b"hello", "no JSON"),
        (b"\x02" + bytes(7) + b"[]", "no JSON object"),
        (b"\x0b" + bytes(7) + b'{"w": null}', "entry of tensor 'w'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "does not fit"),
    ],
)
def test_damaged_header(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        _open(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"shape": [1], "data_offsets": [0, 4]},
    ],
)
def test_unsound_entries_are_named(tmp_path: Path, entry: dict[str, object]) -> None:
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelError, match="tensor 'w'"):
        _open(tmp_path)


def test_missing_shard_and_missing_tensor_in_a_shard(tmp_path: Path) -> None:
    weight_map = _write_shards(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"b\.safetensors lacks tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        _open(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors is missing: .* places tensor"):
        _open(tmp_path)
    assert len(weight_map) == len(TENSORS)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"w": 1}}', '{"weight_map": {"w": "../w"}}']
)
def test_damaged_index(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        _open(tmp_path)


def test_folder_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has none"):
        _open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin"):
        _open(tmp_path)


def test_unaligned_data_is_copied_not_misread(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [1, 17]}}).encode()
    header += b" " * (-len(header) % 8)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    content = len(header).to_bytes(8, "little") + header + b"\0" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    matrix = _open(tmp_path).matrix("w", (2, 2))
    assert isinstance(matrix, PlainMatrix)
    assert torch.equal(matrix.weight_NK, values)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_a_model_error_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = _write(tmp_path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        weights = _open(tmp_path)
        weights.tensor("model.norm.weight", (4,))
    except ModelError as error:
        assert str(tmp_path) in str(error)
