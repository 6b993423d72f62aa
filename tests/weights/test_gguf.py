"""GGUF weights: packed rows of every type, un-permuted Q and K, named errors; and the demo model's tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from sonar.errors import ModelError
from sonar.gguf_file import SERVED_TYPES, GGUFFile
from sonar.model_config import load_model_config
from sonar.model_source import ModelSource
from sonar.ops.table import GGUFMatrix, PlainMatrix
from sonar.weights.gguf_names import GGUFNames
from sonar.weights.gguf_weights import GGUFWeights
from tests.gguf_writing import quantized, write_gguf
from tests.weights.test_safetensors import config_of

QUANTIZED = [name for name in SERVED_TYPES if name not in ("F32", "F16", "BF16")]


def _open(path: Path, architecture: str = "llama", dtype: torch.dtype = torch.float32) -> GGUFWeights:
    return GGUFWeights(GGUFFile(path), config_of(architecture), dtype, torch.device("cpu"))


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_packed_matrices_of_every_type(type_name: str, tmp_path: Path) -> None:
    data = quantized((4, 256), type_name)
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"blk.0.ffn_up.weight": (data, type_name)})
    matrix = _open(path).matrix("model.layers.0.mlp.up_proj.weight", (4, 256))
    assert isinstance(matrix, GGUFMatrix)
    assert (matrix.type_name, matrix.shape) == (type_name, (4, 256))
    assert np.array_equal(matrix.raw_NX.numpy(), data)


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_dense_matrices_as_stored(type_name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    values = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"output.weight": (data, type_name)})
    matrix = _open(path).matrix("lm_head.weight", (3, 4))
    assert isinstance(matrix, PlainMatrix)
    assert matrix.weight_NK.dtype == dtype
    assert torch.equal(matrix.weight_NK, torch.from_numpy(values).to(dtype))


@pytest.mark.parametrize("type_name", ["F32", "Q4_K"])
def test_q_and_k_of_llama_come_in_order(type_name: str, tmp_path: Path) -> None:
    """Two heads of two rows each, held as (first half, second half) by turns; K has one head."""
    if type_name == "F32":
        data = np.arange(8 * 256, dtype=np.float32).reshape(8, 256)
    else:
        data = quantized((8, 256), type_name)
    tensors = dict.fromkeys(("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"), (data, type_name))
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, tensors)
    weights = _open(path)
    orders = {"q": [0, 2, 1, 3, 4, 6, 5, 7], "k": [0, 2, 4, 6, 1, 3, 5, 7], "v": list(range(8))}
    for part, order in orders.items():
        matrix = weights.matrix(f"model.layers.0.self_attn.{part}_proj.weight", (8, 256))
        rows = matrix.raw_NX if isinstance(matrix, GGUFMatrix) else matrix.weight_NK
        assert np.array_equal(rows.numpy(), data[order]), part


def test_other_architectures_are_not_permuted(tmp_path: Path) -> None:
    data = np.arange(8.0, dtype=np.float32).reshape(8, 1)
    path = write_gguf(tmp_path / "m.gguf", "qwen2", {}, {"blk.0.attn_q.weight": (data, "F32")})
    matrix = _open(path, "qwen2").matrix("model.layers.0.self_attn.q_proj.weight", (8, 1))
    assert isinstance(matrix, PlainMatrix)
    assert matrix.weight_NK.flatten().tolist() == list(range(8))


def test_vectors_in_the_compute_dtype_even_from_packed_rows(tmp_path: Path) -> None:
    data = quantized((1, 256), "Q8_0")
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"output_norm.weight": (data.reshape(-1), "Q8_0")})
    values = _open(path, dtype=torch.bfloat16).tensor("model.norm.weight", (256,))
    expected = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType.Q8_0)[0])
    assert torch.equal(values, expected.bfloat16())


def test_gemma_norms_come_without_the_one(tmp_path: Path) -> None:
    stored = {"output_norm.weight": (np.array([1.5, 0.75], dtype=np.float32), "F32")}
    path = write_gguf(tmp_path / "m.gguf", "gemma3", {}, stored)
    assert _open(path, "gemma3_text").tensor("model.norm.weight", (2,)).tolist() == [0.5, -0.25]


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"output_norm.weight": (np.ones(2, dtype=np.float32), "F32")})
    weights = _open(path)
    with pytest.raises(ModelError, match=r"m\.gguf: tensor 'blk\.3\.ffn_up\.weight' \(model\.layers\.3.* is missing"):
        weights.matrix("model.layers.3.mlp.up_proj.weight", (4, 4))
    with pytest.raises(
        ModelError, match=r"'output_norm\.weight' .* has shape \(2,\); the model's metadata needs \(4,\)"
    ):
        weights.tensor("model.norm.weight", (4,))


def test_unserved_type_is_named(tmp_path: Path) -> None:
    data = quantized((2, 256), "IQ4_XS")
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"output.weight": (data, "IQ4_XS")})
    with pytest.raises(ModelError, match=r"'output\.weight' .* has type IQ4_XS; supported are F32"):
        _open(path).matrix("lm_head.weight", (2, 256))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt2"])
def test_names_go_both_ways(architecture: str) -> None:
    names = GGUFNames(architecture)
    prefix, top = (
        ("transformer.h.7", "transformer.ln_f") if architecture == "gpt2" else ("model.layers.7", "model.norm")
    )
    parts = {
        "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"),
        "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "input_layernorm"),
    }.get(architecture, ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "post_attention_layernorm"))
    for name in [f"{prefix}.{part}.{kind}" for part in parts for kind in ("weight", "bias")] + [f"{top}.weight"]:
        assert names.to_gguf(name) != name
        assert names.to_hf(names.to_gguf(name)) == name
    assert names.to_gguf("rope_freqs.weight") == names.to_hf("rope_freqs.weight") == "rope_freqs.weight"
    assert names.to_hf("blk.2.unheard_of.weight").endswith(".2.unheard_of.weight")


def test_unread_tensors_have_the_names_models_use(tmp_path: Path) -> None:
    tensors = {name: (np.ones(2, dtype=np.float32), "F32") for name in ("blk.0.attn_norm.weight", "blk.0.odd.weight")}
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, tensors)
    weights = _open(path)
    assert weights.unread() == ["model.layers.0.input_layernorm.weight", "model.layers.0.odd.weight"]
    weights.tensor("model.layers.0.input_layernorm.weight", (2,))
    assert weights.unread() == ["model.layers.0.odd.weight"]


def test_demo_model(smollm2: ModelSource) -> None:
    """Shapes, types, and that Q of a layer is the file's Q in another order of rows."""
    file, config = GGUFFile(smollm2.path), load_model_config(smollm2)
    weights = GGUFWeights(file, config, torch.float32, torch.device("cpu"))
    table = weights.matrix("model.embed_tokens.weight", (49152, 576))
    assert isinstance(table, GGUFMatrix)
    assert table.type_name == "Q8_0"
    q = weights.matrix("model.layers.29.self_attn.q_proj.weight", (576, 576))
    assert isinstance(q, GGUFMatrix)
    stored = file.rows(file.tensors["blk.29.attn_q.weight"])
    assert q.type_name == "Q4_1"
    assert np.array_equal(q.raw_NX[1].numpy(), stored[2])
    assert np.array_equal(q.raw_NX[32].numpy(), stored[1])
    assert len(weights.unread()) == len(file.tensors) - 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_pages_are_given_back_and_matrices_stay(tmp_path: Path) -> None:
    rows = quantized((8192, 256), "Q8_0")
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"token_embd.weight": (rows, "Q8_0")})
    weights = _open(path)
    matrix = weights.matrix("model.embed_tokens.weight", (8192, 256))
    assert isinstance(matrix, GGUFMatrix)
    assert int(matrix.raw_NX.sum(dtype=torch.int64)) == int(rows.sum(dtype=np.int64))
    assert _resident_bytes(path) >= rows.nbytes
    weights.release_pages()
    assert _resident_bytes(path) < rows.nbytes // 8
    assert np.array_equal(matrix.raw_NX.numpy(), rows)


def _resident_bytes(path: Path) -> int:
    """Of this process's mappings of the file."""
    parts = Path("/proc/self/smaps").read_text().split("VmFlags")
    return sum(1024 * int(part.split("Rss:")[1].split()[0]) for part in parts if str(path) in part)
