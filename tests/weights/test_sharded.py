"""Ranks' parts of a checkpoint: together they are the whole, in every format, and nothing but the part is read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sonar.distributed.shard_map import make_shard_map
from sonar.gguf_file import GGUFFile
from sonar.ops.reference_matrix import dequantize_rows
from sonar.ops.table import GGUFMatrix, Matrix
from sonar.weights.gguf_weights import GGUFWeights
from sonar.weights.sharded_weights import ShardedWeights
from tests.distributed.test_shard_map import model
from tests.gguf_writing import quantized, write_gguf

LAYER = "model.layers.0."
# 3 KV heads of 64 with 3 query heads each; 1536 features.
TENSORS = {
    "blk.0.attn_q.weight": (576, 256),
    "blk.0.attn_k.weight": (192, 256),
    "blk.0.attn_output.weight": (256, 576),
    "blk.0.ffn_up.weight": (1536, 256),
    "blk.0.ffn_down.weight": (256, 1536),
    "token_embd.weight": (515, 256),
}


def dense(matrix: Matrix) -> Tensor:
    if isinstance(matrix, GGUFMatrix):
        return dequantize_rows(matrix, 0, matrix.shape[0])
    return matrix.weight_NK.float()


def opened(path: Path, type_name: str) -> GGUFWeights:
    names = {name: shape for name, shape in TENSORS.items() if type_name != "Q4_K" or shape[1] % 256 == 0}
    tensors = {name: (quantized(shape, type_name), type_name) for name, shape in names.items()}
    file = write_gguf(path / "m.gguf", "qwen2", {}, tensors)
    return GGUFWeights(GGUFFile(file), model(vocab=515), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("tp_size", [2, 3, 4])
@pytest.mark.parametrize("type_name", ["F16", "Q4_1", "Q8_0", "Q4_K"])
def test_parts_make_the_whole(tmp_path, type_name, tp_size):
    weights = opened(tmp_path, type_name)
    config = model(vocab=515)
    ranks = [ShardedWeights(weights, make_shard_map(config, tp_size, rank)) for rank in range(tp_size)]
    maps = [make_shard_map(config, tp_size, rank) for rank in range(tp_size)]
    cases = {
        f"{LAYER}self_attn.q_proj.weight": (0, 576, 256, lambda m: m.heads.size * 64),
        f"{LAYER}self_attn.o_proj.weight": (1, 256, 576, lambda m: m.heads.size * 64),
        f"{LAYER}mlp.up_proj.weight": (0, 1536, 256, lambda m: m.inner.size),
        f"{LAYER}mlp.down_proj.weight": (1, 256, 1536, lambda m: m.inner.size),
        "model.embed_tokens.weight": (0, 515, 256, lambda m: m.vocabulary.size),
    }
    for name, (dim, num_rows, num_columns, owned) in cases.items():
        if not weights.has(name):
            continue
        parts = []
        for rank, shard in zip(ranks, maps):
            shape = (owned(shard), num_columns) if dim == 0 else (num_rows, owned(shard))
            parts.append(dense(rank.matrix(name, shape)))
        assert torch.equal(torch.cat(parts, dim=dim), dense(weights.matrix(name, (num_rows, num_columns)))), name


def test_rows_of_a_mapped_file_are_views_and_columns_stay_packed(tmp_path):
    weights = opened(tmp_path, "Q4_1")
    rank = ShardedWeights(weights, make_shard_map(model(vocab=515), 3, 1))
    whole, part = (
        weights.matrix(f"{LAYER}mlp.up_proj.weight", (1536, 256)),
        rank.matrix(f"{LAYER}mlp.up_proj.weight", (512, 256)),
    )
    assert isinstance(part, GGUFMatrix) and isinstance(whole, GGUFMatrix)
    assert part.raw_NX.data_ptr() == whole.raw_NX.data_ptr() + 512 * whole.raw_NX.shape[1]
    down = rank.matrix(f"{LAYER}mlp.down_proj.weight", (256, 512))
    assert isinstance(down, GGUFMatrix) and down.type_name == "Q4_1" and down.shape == (256, 512)


def test_a_cut_within_a_block_is_dequantized_and_said_once(tmp_path, caplog):
    """Heads of 64 do not divide blocks of 256 numbers."""
    tensors = {"blk.0.attn_output.weight": (quantized((8, 768), "Q6_K"), "Q6_K")}
    file = write_gguf(tmp_path / "m.gguf", "qwen2", {}, tensors)
    config = model(num_kv_heads=4, group=3, vocab=515)
    weights = GGUFWeights(GGUFFile(file), config, torch.float32, torch.device("cpu"))
    name = f"{LAYER}self_attn.o_proj.weight"
    parts = []
    with caplog.at_level(logging.WARNING):
        for rank in range(4):
            sharded = ShardedWeights(weights, make_shard_map(config, 4, rank))
            parts.append(dense(sharded.matrix(name, (8, 192))))
            sharded.matrix(name, (8, 192))
    assert torch.equal(torch.cat(parts, dim=1), dense(weights.matrix(name, (8, 768))))
    assert len(caplog.records) == 4 and "columns 192 to 383 cut through blocks of 256 (Q6_K)" in caplog.text
