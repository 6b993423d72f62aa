"""Rotation, cache write and paged attention against formulas applied token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonar.config import RopeConfig
from sonar.layers.rotary import build_cos_sin
from sonar.ops import reference_attention
from sonar.ops.reference import build
from sonar.ops.table import AttentionSpec
from tests.ops.paged_case import attend_one_by_one, make_case

OPS = build(torch.device("cpu"), torch.float32)
DECODES = [(1, 1), (1, 9), (1, 40), (1, 16)]
MIXED = [(1, 33), (1, 2), (5, 5), (17, 30), (2, 41), (8, 8)]


def _spec(**changes: float) -> AttentionSpec:
    values = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 12, "scale": 0.3, **changes}
    return AttentionSpec(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("requests", [DECODES, MIXED, [(1, 7)], [(23, 23)]], ids=["decodes", "mixed", "one", "prefill"])
@pytest.mark.parametrize(
    "spec",
    [
        _spec(),
        _spec(num_heads=2, head_dim=5),
        _spec(num_heads=3, num_kv_heads=1),
        _spec(window=1),
        _spec(window=11),
        _spec(window=100),
        _spec(softcap=0.8),
        _spec(window=7, softcap=1.5),
    ],
    ids=str,
)
def test_paged_attention(spec: AttentionSpec, requests: list[tuple[int, int]], block_size: int) -> None:
    case = make_case(requests, spec, block_size)
    actual = OPS.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.double(), attend_one_by_one(case), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 9])
def test_sinks_take_a_share_of_the_softmax(window: int) -> None:
    spec = _spec(window=window)
    case, sinks_H = make_case(MIXED, spec, 8), torch.linspace(-2, 3, spec.num_heads)
    actual = OPS.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec, sinks_H)
    torch.testing.assert_close(actual.double(), attend_one_by_one(case, sinks_H), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 9])
def test_work_cut_into_small_runs_gives_the_same(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _spec(window=window)
    case = make_case(DECODES + MIXED[2:], spec, 8)
    expected = OPS.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec)
    monkeypatch.setattr(reference_attention, "_MAX_GATHERED", 1)
    monkeypatch.setattr(reference_attention, "_MAX_SCORES", 6 * 45 * 3)
    actual = OPS.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    spec = _spec()
    case = make_case(MIXED, spec, 8, dtype)
    actual = OPS.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec)
    assert actual.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), attend_one_by_one(case), atol=eps / 8, rtol=eps)


def test_large_scores_do_not_overflow() -> None:
    spec = _spec(scale=1e4)
    case = make_case([(1, 20), (4, 9)], spec, 8)
    assert OPS.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec).isfinite().all()


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def _rotated(x: Tensor, position: int, theta: float, rotary_dim: int) -> Tensor:
    """Pairs (i, i + rotary_dim / 2) as complex numbers times e^(i angle)."""
    half = rotary_dim // 2
    angles = position * theta ** (-2 * torch.arange(half, dtype=torch.float64) / rotary_dim)
    pairs = torch.complex(x[:half], x[half:rotary_dim]) * torch.polar(torch.ones(half, dtype=torch.float64), angles)
    return torch.cat((pairs.real, pairs.imag, x[rotary_dim:]))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 4, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_kv_write(dtype: torch.dtype, rotary_dim: int, has_norm: bool) -> None:
    spec, eps, block_size, generator = _spec(), 1e-5, 8, torch.Generator().manual_seed(3)
    num_q, num_kv, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    positions_T, slots_T = torch.tensor([0, 3, 200, 17, 4]), torch.tensor([17, 0, 39, 8, 30])
    qkv_TX = torch.randn(5, (num_q + 2 * num_kv) * head_dim, generator=generator).to(dtype)
    before = qkv_TX.clone()
    q_norm_E, k_norm_E = torch.randn(2, head_dim, generator=generator).to(dtype) if has_norm else (None, None)
    kv_cache = torch.full((5, 2, 2, num_kv, block_size, head_dim), float("nan"), dtype=dtype)[:, 1]
    cos_sin_PR = build_cos_sin(RopeConfig(50.0, rotary_dim), 256, torch.device("cpu")) if rotary_dim else None

    norms = (q_norm_E, k_norm_E, eps)
    q_THE = OPS.rope_kv_write(qkv_TX, positions_T, cos_sin_PR, *norms, kv_cache, slots_T, spec)

    assert q_THE.is_contiguous() and q_THE.dtype == dtype and qkv_TX.equal(before)
    tolerance = {"atol": 4 * torch.finfo(dtype).eps, "rtol": 4 * torch.finfo(dtype).eps}
    if dtype == torch.float32:
        tolerance = {"atol": 2e-5, "rtol": 1e-5}  # float32 angles
    for row, (position, slot) in enumerate(zip(positions_T.tolist(), slots_T.tolist(), strict=True)):
        heads = qkv_TX[row].double().view(-1, head_dim)
        for head in range(num_q + num_kv):
            weight = q_norm_E if head < num_q else k_norm_E
            expected = heads[head] if weight is None else _normalize(heads[head], weight.double(), eps)
            expected = _rotated(expected, position, 50.0, rotary_dim)
            actual = q_THE[row, head] if head < num_q else kv_cache[slot // 8, 0, head - num_q, slot % 8]
            torch.testing.assert_close(actual.double(), expected, **tolerance)
        assert kv_cache[slot // 8, 1, :, slot % 8].double().equal(heads[num_q + num_kv :])
    written = torch.zeros(40, dtype=torch.bool).index_fill_(0, slots_T, True).view(5, 8)
    assert kv_cache.isnan().all(dim=(1, 2, 4)).equal(~written), "wrote outside its slots"


def test_cache_of_another_dtype_is_cast() -> None:
    spec = _spec()
    kv_cache = torch.zeros(2, 2, 2, 8, 12, dtype=torch.bfloat16)
    qkv_TX = torch.randn(1, 10 * 12)
    OPS.rope_kv_write(qkv_TX, torch.tensor([0]), None, None, None, 0.0, kv_cache, torch.tensor([9]), spec)
    assert kv_cache[1, 1, :, 1].equal(qkv_TX.view(10, 12)[8:].bfloat16())
