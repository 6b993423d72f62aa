"""Which batch sizes are captured; padded buffers give what a step's own inputs give (no GPU: TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch

from sonar.config import EngineConfig
from sonar.kvcache.groups import cache_groups
from sonar.model_config import load_model_config
from sonar.model_source import resolve_model
from sonar.models.base import ForwardBatch
from sonar.models.registry import load_model
from sonar.ops.registry import select_ops
from sonar.ops.table import AttentionMetadata
from sonar.weights.open_weights import open_weights
from sonar.worker.cuda_graphs import DecodeGraphs, ladder
from sonar.worker.inputs import StepInputs
from sonar.worker.kv_cache import CacheLayout, KVCache
from tests.tiny import write_tiny_folder

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16


@pytest.mark.parametrize("largest", [1, 2, 7, 8, 100, 256, 512, 1000, 5000])
def test_ladder(largest: int) -> None:
    sizes = ladder(largest)
    assert sizes[0] == 1 and sizes[-1] == largest and sorted(set(sizes)) == list(sizes)
    # Padding never costs as many rows as the step has, and from 16 on at most half of them.
    assert all(b - a <= max(2, a // 2) for a, b in pairwise(sizes) if a > 1)
    assert len(sizes) < 50


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", HALF), ("gemma3", torch.float32)])
def test_a_padded_step_gives_what_its_own_inputs_give(family, dtype, tmp_path) -> None:
    folder = write_tiny_folder(family, tmp_path)
    source = resolve_model(str(folder))
    config = load_model_config(source)
    ops = select_ops(DEVICE, dtype, "cuda")
    weights = open_weights(source, config, EngineConfig(model="").load_format, dtype, DEVICE)
    model = load_model(config, weights, ops)
    groups = cache_groups(config)
    layout = CacheLayout(groups, config.num_kv_heads, config.head_dim, 16, dtype)
    caches = [KVCache(layout, (12,) * len(groups), DEVICE) for _ in range(2)]
    for cache in caches:
        for tensor in cache.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    graphs = DecodeGraphs(model, caches[0], ops.sample, DEVICE, max_requests=6, max_blocks=4)
    graphs.warm_up()
    assert all(a.equal(b) for a, b in zip(caches[0].tensors, caches[1].tensors)), "a warm-up wrote to the cache"
    for seq_lens in ([5, 33, 17], [20]):  # the second finds rows of the first in the buffers
        forward = _decode(caches[1], seq_lens)
        graphs._fill(forward, len(seq_lens))
        padded = graphs._compute(graphs._batch(4))
        expected = model.logits(model.forward(forward))
        torch.testing.assert_close(padded.logits_SV[: len(seq_lens)], expected, rtol=0.02, atol=0.02)
        assert padded.greedy_S is not None
        assert padded.greedy_S[: len(seq_lens)].tolist() == padded.logits_SV[: len(seq_lens)].argmax(dim=-1).tolist()
        for a, b in zip(caches[0].tensors, caches[1].tensors):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    inputs = StepInputs(forward, None, None, None, None, None)
    assert not graphs.can_run(inputs), "nothing has been captured"


def _decode(cache: KVCache, seq_lens: list[int]) -> ForwardBatch:
    """A decode step of requests that own three blocks each."""
    count = len(seq_lens)
    lengths = torch.tensor(seq_lens, device=DEVICE)
    positions = lengths - 1
    table = torch.arange(3 * count, dtype=torch.int32, device=DEVICE).view(count, 3)
    rows = torch.arange(count, device=DEVICE)
    metadata = AttentionMetadata(
        block_table_RB=table,
        slot_mapping_T=table[rows, positions // 16].to(torch.int64) * 16 + positions % 16,
        query_start_R1=torch.arange(count + 1, dtype=torch.int32, device=DEVICE),
        seq_lens_R=lengths.to(torch.int32),
        num_decodes=count,
        max_query_len=1,
        max_seq_len=max(seq_lens),
    )
    return ForwardBatch(
        token_ids_T=rows + 7,
        positions_T=positions,
        kv_layers=cache.layers,
        attention=(metadata,) * len(cache.layers),
        logits_rows_S=rows,
    )
