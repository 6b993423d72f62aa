"""Cache memory: layout, views, copies, and what is said when it does not fit."""

from __future__ import annotations

import pytest
import torch

from sonar.config import LayerKind
from sonar.errors import CapacityError
from sonar.kvcache.groups import CacheGroup
from sonar.worker.kv_cache import CacheLayout, KVCache

CPU = torch.device("cpu")
GROUPS = (CacheGroup(LayerKind.SLIDING, (0, 1, 3), 16), CacheGroup(LayerKind.FULL, (2,)))


def make_layout(dtype=torch.float32):
    return CacheLayout(GROUPS, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_is_one_contiguous_piece_over_its_groups_layers(dtype):
    layout = make_layout(dtype)
    cache = KVCache(layout, (5, 7), CPU)
    assert [tuple(t.shape) for t in cache.tensors] == [(5, 3, 2, 2, 4, 8), (7, 1, 2, 2, 4, 8)]
    assert all(t.is_contiguous() and not t.any() for t in cache.tensors)
    for group, tensor in enumerate(cache.tensors):
        assert tensor[0].numel() * tensor.element_size() == layout.block_bytes(group)
    assert cache.size_bytes == 5 * layout.block_bytes(0) + 7 * layout.block_bytes(1)


def test_layers_are_views_in_model_order():
    cache = KVCache(make_layout(), (5, 7), CPU)
    assert cache.group_of_layer == (0, 0, 1, 0)
    for layer, view in enumerate(cache.layers):
        view[3].fill_(layer + 1)
    assert [int(cache.tensors[0][3, i].flatten()[0]) for i in range(3)] == [1, 2, 4]
    assert int(cache.tensors[1][3, 0].flatten()[0]) == 3
    assert all(view.stride(-1) == 1 and view.shape[1:] == (2, 2, 4, 8) for view in cache.layers)


def test_copies_run_in_order_within_their_group():
    cache = KVCache(make_layout(), (5, 7), CPU)
    cache.tensors[0][1].fill_(1.0)
    cache.copy([(0, 1, 2), (0, 2, 3)])
    assert cache.tensors[0][3].eq(1.0).all()
    assert not cache.tensors[1].any()


def test_a_cache_that_cannot_be_had_names_what_it_needs():
    layout = make_layout()
    count = 2**58 // layout.block_bytes(0)
    with pytest.raises(CapacityError, match=rf"needs {count * layout.block_bytes(0)} bytes for {count} blocks"):
        KVCache(layout, (count, 1), CPU)
