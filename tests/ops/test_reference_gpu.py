"""The reference on a GPU gives what it gives on the CPU, and sampling never waits for the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sonar.ops.reference import build
from sonar.ops.table import Activation, AttentionSpec, GGUFMatrix, PlainMatrix
from tests.ops.paged_case import make_case
from tests.ops.sample_formula import Row, to_tensors

pytestmark = pytest.mark.gpu

GPU = "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _close(actual: Tensor, expected: Tensor) -> None:
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual.cpu(), expected, rtol=max(2 * eps, 1e-5), atol=max(eps, 1e-5))


def _on_gpu(value: object) -> object:
    return value.to(GPU) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_ops(dtype: torch.dtype) -> None:
    here, there = build(torch.device("cpu"), dtype), build(torch.device(GPU), dtype)
    x_TD, residual_TD = torch.randn(2, 5, 77).to(dtype)
    weight_D, bias_D = torch.randn(2, 77).to(dtype)
    x, residual, weight, bias = (t.to(GPU) for t in (x_TD, residual_TD, weight_D, bias_D))
    _close(there.rms_norm(x, weight, 1e-5), here.rms_norm(x_TD, weight_D, 1e-5))
    _close(there.layer_norm(x, weight, bias, 1e-5), here.layer_norm(x_TD, weight_D, bias_D, 1e-5))
    _close(there.add_rms_norm(x, residual, weight, 1e-5), here.add_rms_norm(x_TD, residual_TD, weight_D, 1e-5))
    _close(residual, residual_TD)
    for kind in Activation:
        _close(there.activation(x, kind), here.activation(x_TD, kind))
    matrix = GGUFMatrix(torch.randint(0, 60, (11, 34 * 2), dtype=torch.uint8), "Q8_0", 64)
    parts = [PlainMatrix(torch.randn(3, 64)), matrix]
    x_TK = torch.randn(4, 64).to(dtype)
    actual = there.linear(parts, torch.ones(14))(x_TK.to(GPU))
    expected = here.linear(parts, torch.ones(14))(x_TK)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0.02, atol=20 * torch.finfo(dtype).eps)
    ids_T = torch.tensor([10, 0])
    for table in (matrix, PlainMatrix(torch.randn(12, 64))):
        assert there.embedding(table)(ids_T.to(GPU)).cpu().equal(here.embedding(table)(ids_T))


@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: torch.dtype, window: int) -> None:
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125, window=window)
    case = make_case([(1, 33), (1, 2), (5, 5), (17, 300)], spec, 16, dtype)
    here, there = build(torch.device("cpu"), dtype), build(torch.device(GPU), dtype)
    metadata = dataclasses.replace(case.metadata, **{k: _on_gpu(v) for k, v in vars(case.metadata).items()})
    actual = there.paged_attention(case.q_THE.to(GPU), case.kv_cache.to(GPU), metadata, spec)
    _close(actual, here.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec))


def test_rope_kv_write() -> None:
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125)
    arguments = [torch.randn(3, 640), torch.tensor([0, 5, 9]), torch.randn(10, 32), None, torch.randn(64), 1e-6]
    caches = [torch.zeros(4, 2, 2, 16, 64, device=device) for device in ("cpu", GPU)]
    slots_T = torch.tensor([3, 60, 17])
    expected = build(torch.device("cpu"), torch.float32).rope_kv_write(*arguments, caches[0], slots_T, spec)
    moved = [_on_gpu(value) for value in arguments]
    actual = build(torch.device(GPU), torch.float32).rope_kv_write(*moved, caches[1], slots_T.to(GPU), spec)
    _close(actual, expected)
    _close(caches[1], caches[0])


def test_sampling_draws_the_same_without_waiting() -> None:
    rows = [Row(seed=0), Row(seed=1, temperature=0), Row(seed=2, top_p=0.9), Row(seed=3, typical_p=0.5, top_k=50)] * 8
    logits_SV, sampling = torch.randn(len(rows), 3001), to_tensors(rows)
    expected = build(torch.device("cpu"), torch.float32).sample(logits_SV.clone(), sampling)
    moved = dataclasses.replace(sampling, **{k: _on_gpu(v) for k, v in vars(sampling).items()})
    ops, logits = build(torch.device(GPU), torch.float32), logits_SV.to(GPU)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = ops.sample(logits, moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert actual.tolist() == expected.tolist()
