"""The CUDA backend against the reference; on a GPU, or without one in Triton's interpreter (TRITON_INTERPRET=1).

Tolerances: a result of a 16-bit dtype may differ by a few of its last digits, sums over thousands of terms included.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sonar.ops import reference
from sonar.ops.table import Activation, AttentionSpec, OpTable, PlainMatrix
from tests.ops.paged_case import attend_one_by_one, make_case
from tests.ops.sample_formula import Row, to_tensors

pytestmark = pytest.mark.gpu

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
DTYPES = [torch.float32, HALF]


def _table(dtype: torch.dtype) -> OpTable:
    from sonar.ops.cuda import build

    return build(DEVICE, dtype)


def _close(actual: Tensor, expected: Tensor, factor: float = 2.0) -> None:
    eps = torch.finfo(actual.dtype).eps if actual.dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(actual.cpu().float(), expected.cpu().float(), rtol=factor * eps, atol=factor * eps)


@pytest.mark.parametrize("shape", [(1, 64), (3, 1000), (2, 4096), (2, 3, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ops, ref = _table(dtype), reference.build(DEVICE, dtype)
    x, weight = torch.randn(shape).to(DEVICE, dtype), torch.randn(shape[-1]).to(DEVICE, dtype)
    _close(ops.rms_norm(x, weight, 1e-5), ref.rms_norm(x, weight, 1e-5))
    if len(shape) == 2:
        residual = torch.randn(shape).to(DEVICE, dtype)
        twin = residual.clone()
        _close(ops.add_rms_norm(x, residual, weight, 1e-5), ref.add_rms_norm(x, twin, weight, 1e-5))
        _close(residual, twin)


@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(dtype: torch.dtype, kind: Activation) -> None:
    x = torch.randn(3, 2 * 1500).to(DEVICE, dtype)
    expected = reference.build(DEVICE, torch.float32).gated_activation(x.float(), kind)
    _close(_table(dtype).gated_activation(x, kind), expected)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), [(4, 2, 64, 64), (12, 4, 80, 32), (2, 1, 128, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_kv_write(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotary: int, has_norm: bool) -> None:
    spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=0.1)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim).to(DEVICE, dtype)
    positions = torch.tensor([0, 7, 3, 31, 2], device=DEVICE)
    cos_sin = torch.randn(32, rotary).to(DEVICE) if rotary else None
    norms = [torch.randn(dim).to(DEVICE, dtype) if has_norm else None for _ in range(2)]
    slots = torch.tensor([17, 0, 95, 33, 40], device=DEVICE)
    caches = [torch.zeros(6, 3, 2, kv_heads, 16, dim, dtype=dtype, device=DEVICE)[:, 1] for _ in range(2)]
    arguments = [(qkv, positions, cos_sin, *norms, 1e-6, cache, slots, spec) for cache in caches]
    actual = _table(dtype).rope_kv_write(*arguments[0])
    _close(actual, reference.build(DEVICE, dtype).rope_kv_write(*arguments[1]), 4.0)
    _close(caches[0], caches[1], 4.0)


def test_rope_writes_no_token_of_a_negative_slot() -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=64, scale=0.1)
    cache = torch.zeros(2, 2, 1, 16, 64, dtype=HALF, device=DEVICE)
    qkv = torch.ones(2, 4 * 64, dtype=HALF, device=DEVICE)
    positions, slots = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.tensor([-1, 5], device=DEVICE)
    _table(HALF).rope_kv_write(qkv, positions, None, None, None, 1e-6, cache, slots, spec)
    assert cache[0, :, :, 5].eq(1).all() and cache.sum() == 2 * 64


CASES = {
    "decodes": [(1, 1), (1, 33), (1, 64), (1, 333), (1, 1000)],
    "prompts": [(5, 5), (17, 300), (130, 130), (64, 200)],
    "mixed": [(1, 70), (1, 2), (2, 2), (40, 77)],
}


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125),
        AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=80, scale=0.1, window=40),
        AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=128, scale=0.09, softcap=5.0),
    ],
    ids=["plain", "window", "softcap"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention(dtype: torch.dtype, spec: AttentionSpec, case_name: str, has_sinks: bool) -> None:
    case = make_case(CASES[case_name], spec, 16, dtype)
    sinks = torch.linspace(-1.0, 2.0, spec.num_heads) if has_sinks else None
    moved = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in vars(case.metadata).items()}
    metadata = dataclasses.replace(case.metadata, **moved)
    q, cache = case.q_THE.to(DEVICE), case.kv_cache.to(DEVICE)
    ops = _table(dtype)
    for _ in range(2):  # the second launch finds the counters as the first left them
        actual = ops.paged_attention(q, cache, metadata, spec, None if sinks is None else sinks.to(DEVICE))
    if IS_INTERPRETED or case_name != "prompts":
        _close(actual, attend_one_by_one(case, sinks), 4.0)
    else:
        table = reference.build(torch.device("cpu"), torch.float32)
        expected = table.paged_attention(case.q_THE.float(), case.kv_cache.float(), case.metadata, spec, sinks)
        _close(actual, expected, 4.0)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_whole_prompts_of_one_length(has_sinks: bool) -> None:
    """A step that cuDNN serves, and with sinks one that it must not."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.2)
    case = make_case([(520, 520)] * 4, spec, 16, HALF)
    sinks = torch.linspace(-1.0, 2.0, spec.num_heads) if has_sinks else None
    moved = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in vars(case.metadata).items()}
    metadata = dataclasses.replace(case.metadata, **moved)
    on_device = None if sinks is None else sinks.to(DEVICE)
    actual = _table(HALF).paged_attention(case.q_THE.to(DEVICE), case.kv_cache.to(DEVICE), metadata, spec, on_device)
    table = reference.build(torch.device("cpu"), torch.float32)
    _close(actual, table.paged_attention(case.q_THE.float(), case.kv_cache.float(), case.metadata, spec, sinks), 4.0)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary", "window"), [(4, 2, 64, 64, 0), (6, 1, 80, 32, 50)])
def test_rope_attention(heads: int, kv_heads: int, dim: int, rotary: int, window: int, has_norm: bool) -> None:
    """The same as rotation and attention one after the other: output and cache."""
    spec = AttentionSpec(heads, kv_heads, dim, 0.15, window)
    lengths = [1, 33, 129, 500]
    case = make_case([(1, length) for length in lengths], spec, 16, HALF)
    slots = [case.metadata.block_table_RB[i, (n - 1) // 16] * 16 + (n - 1) % 16 for i, n in enumerate(lengths)]
    moved = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in vars(case.metadata).items()}
    moved["slot_mapping_T"] = torch.tensor(slots, device=DEVICE)
    metadata = dataclasses.replace(case.metadata, **moved)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim).to(DEVICE, HALF)
    positions, cos_sin = torch.tensor(lengths, device=DEVICE) - 1, torch.randn(500, rotary).to(DEVICE)
    norms = [torch.randn(dim).to(DEVICE, HALF) if has_norm else None for _ in range(2)]
    ops, caches = _table(HALF), [case.kv_cache.to(DEVICE).clone() for _ in range(2)]
    assert ops.fused is not None
    for _ in range(2):
        actual = ops.fused.rope_attention(qkv, positions, cos_sin, *norms, 1e-6, caches[0], metadata, spec)
    q = ops.rope_kv_write(qkv, positions, cos_sin, *norms, 1e-6, caches[1], metadata.slot_mapping_T, spec)
    _close(actual, ops.paged_attention(q, caches[1], metadata, spec), 4.0)
    assert caches[0].nan_to_num(7.0).equal(caches[1].nan_to_num(7.0))


@pytest.mark.parametrize("num_rows", [1, 2, 16])
@pytest.mark.parametrize(("num_out", "num_in"), [(96, 64), (1000, 3072)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fused_products(num_out: int, num_in: int, num_rows: int, has_bias: bool) -> None:
    """Both ways: what the table of tiles chooses here (cuBLAS for several rows of these shapes), and the kernels."""
    from sonar.ops.cuda_linear import CudaLinear, Fusion
    from sonar.ops.cuda_tiles import FewRowsTiles, OneRowTiles

    ops, ref = _table(HALF), reference.build(DEVICE, torch.float32)
    assert ops.fused is not None
    weight = (torch.randn(num_out, num_in) * num_in**-0.5).to(DEVICE, HALF)
    bias = torch.randn(num_out).to(DEVICE, HALF) if has_bias else None
    linear, exact = ops.linear([PlainMatrix(weight)], bias), ref.linear([PlainMatrix(weight)], bias)
    assert isinstance(linear, CudaLinear)
    x, norm = torch.randn(num_rows, num_in).to(DEVICE, HALF), torch.randn(num_in).to(DEVICE, HALF)
    normed = ref.rms_norm(x.float(), norm.float(), 1e-5)
    residual = torch.randn(num_rows, num_out).to(DEVICE, HALF)
    added = residual.float() + exact(x.float())
    gated = ref.gated_activation(exact(normed), Activation.SILU)
    _close(linear(x), exact(x.float()), 4.0)
    _close(ops.fused.norm_linear(linear, x, norm, 1e-5), exact(normed), 8.0)
    _close(ops.fused.norm_gated_linear(linear, x, norm, 1e-5, Activation.SILU), gated, 16.0)
    twin = residual.clone()
    ops.fused.linear_add(linear, x, twin)
    _close(twin, added, 6.0)
    fusions = [
        (Fusion(residual_MN=residual), added),
        (Fusion(norm_K=norm, norm_eps=1e-5), exact(normed)),
        (Fusion(norm_K=norm, norm_eps=1e-5, gate=Activation.SILU), gated),
    ]
    few_rows = [FewRowsTiles(16, 64, 1, 4, 3), FewRowsTiles(32, 128, 2, 4, 3)]
    for tiles in [OneRowTiles(8, 512, 4), OneRowTiles(2, 4096, 8)] if num_rows == 1 else few_rows:
        for fusion, expected in fusions:
            out = torch.full(expected.shape, float("nan"), dtype=HALF, device=DEVICE)
            if fusion.residual_MN is not None:
                fusion = dataclasses.replace(fusion, residual_MN=out.copy_(residual))
            if isinstance(tiles, OneRowTiles):
                linear.launch_one_row(x, out, fusion, tiles)
            else:
                linear.launch_few_rows(x, out, fusion, tiles)
            _close(out, expected, 16.0)


def test_sampling_draws_what_the_reference_draws() -> None:
    rows = [Row(seed=0), Row(seed=1, temperature=0), Row(seed=2, temperature=0.7), Row(seed=3, temperature=2.0)] * 4
    filtered = [Row(seed=5, top_p=0.9), Row(seed=6, top_k=3), Row(seed=7, temperature=0), Row(seed=8, min_p=0.1)]
    for batch in (rows, filtered, [Row(seed=1, temperature=0)]):
        logits, sampling = torch.randn(len(batch), 9001), to_tensors(batch)
        moved = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in vars(sampling).items()}
        expected = reference.build(torch.device("cpu"), torch.float32).sample(logits.clone(), sampling)
        actual = _table(HALF).sample(logits.to(DEVICE), dataclasses.replace(sampling, **moved))
        assert actual.tolist() == expected.tolist()


def test_ties_go_to_the_lower_id() -> None:
    sampling = to_tensors([Row(seed=1, temperature=0)])
    moved = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in vars(sampling).items()}
    logits = torch.zeros(1, 9001, device=DEVICE)
    logits[0, [5000, 77, 8999]] = 3.0
    assert _table(HALF).sample(logits, dataclasses.replace(sampling, **moved)).tolist() == [77]


def test_tiles_of_a_known_and_an_unknown_device(tmp_path: Path) -> None:
    from sonar.ops.cuda_tiles import FewRowsTiles, OneRowTiles, TileTable, tile_key

    path = tmp_path / "tiles.json"
    entries = {
        tile_key(1, 64, 32, "norm"): {"block_n": 2, "block_k": 32, "num_warps": 1},
        tile_key(8, 64, 32, "add"): {"block_n": 16, "block_k": 32, "split_k": 1, "num_warps": 4, "num_stages": 2},
    }
    path.write_text(json.dumps({"card": entries}))
    known, unknown = TileTable("card", path), TileTable("other card", path)
    assert known.one_row(64, 32, "norm") == OneRowTiles(2, 32, 1)
    assert known.few_rows(2, 64, 32, "add") == FewRowsTiles(16, 32, 1, 4, 2)
    assert known.few_rows(9, 64, 32, "add") is None and unknown.few_rows(2, 64, 32, "add") is None
    for num_out, num_in in ((96, 64), (4096, 1024), (151936, 1024), (4096, 14336)):
        tiles = unknown.one_row(num_out, num_in, "plain")
        assert tiles.block_n * tiles.block_k <= 16384, "a tile that does not stay in registers"
