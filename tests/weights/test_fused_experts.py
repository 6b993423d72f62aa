"""gpt_oss in MXFP4, as it is published: the numbers transformers makes of the same bytes, packed until used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sonar.distributed.shard_map import make_shard_map
from sonar.errors import ModelError
from sonar.model_config import load_model_config
from sonar.model_source import resolve_model
from sonar.models.registry import load_model
from sonar.ops.reference_matrix import dequantize_rows
from sonar.ops.registry import select_ops
from sonar.ops.table import GGUFMatrix
from sonar.weights.finite_weights import FiniteWeights
from sonar.weights.open_weights import open_weights
from sonar.weights.sharded_weights import ShardedWeights
from tests.models.paged_runner import PagedRunner
from tests.tiny import make_tiny_model

CPU = torch.device("cpu")
PROMPT = [(29 * position + 5) % 512 for position in range(40)]
LAYER = "model.layers.2.mlp.experts."


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A folder with experts in MXFP4, and transformers' logits of the same numbers."""
    torch.set_num_threads(1)
    model, folder = make_tiny_model("gpt_oss"), tmp_path_factory.mktemp("mxfp4")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_in, num_out = tensors.pop(name).shape
        shape = (num_experts, num_out, num_in // 32)
        generator = torch.Generator().manual_seed(len(tensors))
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        with torch.no_grad():
            model.get_parameter(name).copy_(dense)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        return folder, model(torch.tensor([PROMPT])).logits[0]


def _open(folder: Path):
    source = resolve_model(str(folder))
    config = load_model_config(source)
    assert config.quantization == "mxfp4"
    return config, open_weights(source, config, "auto", torch.float32, CPU)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_are_those_of_the_same_numbers(packed: tuple[Path, Tensor], backend: str) -> None:
    config, weights = _open(packed[0])
    model = load_model(config, FiniteWeights(weights), select_ops(CPU, torch.float32, backend))
    assert weights.unread() == []
    actual = PagedRunner(model, config, torch.float32).step([(0, PROMPT)])[0]
    torch.testing.assert_close(actual, packed[1], atol=1e-4, rtol=0)


def test_ranks_keep_their_part_packed(packed: tuple[Path, Tensor]) -> None:
    config, weights = _open(packed[0])
    whole = {part: weights.matrix(f"{LAYER}1.{part}_proj.weight", (128, 64)) for part in ("gate", "up")}
    down = weights.matrix(f"{LAYER}1.down_proj.weight", (64, 128))
    assert isinstance(down, GGUFMatrix)
    pieces: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
    for rank in range(2):
        part_of = ShardedWeights(weights, make_shard_map(config, 2, rank))
        for part in pieces:
            shape = (64, 64)
            matrix = part_of.matrix(f"{LAYER}1.{part}_proj.weight", shape)
            assert isinstance(matrix, GGUFMatrix) and matrix.type_name == "MXFP4"
            pieces[part].append(dequantize_rows(matrix, 0, 64))
    for part, matrix in whole.items():
        assert isinstance(matrix, GGUFMatrix)
        assert torch.cat(pieces[part]).equal(dequantize_rows(matrix, 0, 128))
    assert torch.cat(pieces["down"], dim=1).equal(dequantize_rows(down, 0, 64))


def test_a_scale_that_is_no_number_is_refused(packed: tuple[Path, Tensor], tmp_path: Path) -> None:
    tensors = load_file(packed[0] / "model.safetensors")
    tensors[f"{LAYER}down_proj_scales"][3, 5, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((packed[0] / "config.json").read_text())
    config, weights = _open(tmp_path)
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.experts\.3\.down_proj"):
        load_model(config, FiniteWeights(weights), select_ops(CPU, torch.float32, "reference"))
