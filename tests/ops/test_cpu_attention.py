"""Rotation, cache write and paged attention of the CPU backend, against formulas token by token, at every level."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonar.ops import reference_attention
from sonar.ops.table import AttentionMetadata, AttentionSpec
from tests.ops.cpu_case import LEVELS, at_level, build, with_threads
from tests.ops.paged_case import attend_one_by_one, make_case

DECODES = [(1, 1), (1, 9), (1, 130), (1, 64), (1, 65)]
MIXED = [(1, 70), (1, 2), (5, 5), (17, 90), (2, 129), (64, 64)]


def _spec(**changes: float) -> AttentionSpec:
    values = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 12, "scale": 0.3, **changes}
    return AttentionSpec(**values)  # type: ignore[arg-type]


SPECS = [
    _spec(),
    _spec(num_heads=2, head_dim=5),
    _spec(num_heads=3, num_kv_heads=1, head_dim=64),
    _spec(window=1),
    _spec(window=11, head_dim=16),
    _spec(window=100),
    _spec(softcap=0.8),
    _spec(window=70, softcap=1.5, head_dim=80),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("block_size", [8, 128])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_paged_attention(spec: AttentionSpec, block_size: int, level: str) -> None:
    for requests in (DECODES, MIXED, [(1, 7)], [(100, 100)]):
        case = make_case(requests, spec, block_size)
        with at_level(level):
            actual = build().paged_attention(case.q_THE, case.kv_cache, case.metadata, spec)
        assert actual.is_contiguous()
        # The reference is itself tested token by token; here it stands in for it over many cases.
        expected = reference_attention.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec)
        torch.testing.assert_close(actual, expected, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 9])
def test_sinks_take_a_share_of_the_softmax(window: int) -> None:
    spec = _spec(window=window)
    case, sinks_H = make_case([(1, 70), (3, 20)], spec, 8), torch.linspace(-2, 3, spec.num_heads)
    actual = build().paged_attention(case.q_THE, case.kv_cache, case.metadata, spec, sinks_H)
    torch.testing.assert_close(actual.double(), attend_one_by_one(case, sinks_H), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [12, 64])
def test_caches_of_half_precision(head_dim: int, dtype: torch.dtype) -> None:
    spec = _spec(head_dim=head_dim)
    case = make_case(MIXED, spec, 16, dtype)
    q_THE = case.q_THE.float()
    actual = build().paged_attention(q_THE, case.kv_cache, case.metadata, spec)
    expected = reference_attention.paged_attention(q_THE, case.kv_cache.float(), case.metadata, spec)
    torch.testing.assert_close(actual, expected, atol=4e-6, rtol=1e-5)
    half = build(dtype=dtype).paged_attention(case.q_THE, case.kv_cache, case.metadata, spec)
    assert half.dtype == dtype and half.equal(actual.to(dtype))


@pytest.mark.parametrize("level", LEVELS)
def test_long_decodes(level: str) -> None:
    """Past the length from which keys are split among threads, in a cache of scattered blocks."""
    for requests in ([(1, 2500)], [(1, 1100), (1, 3), (1, 640)]):
        spec = _spec(head_dim=64, scale=0.125)
        case = make_case(requests, spec, 16)
        with at_level(level), with_threads(3):
            actual = build().paged_attention(case.q_THE, case.kv_cache, case.metadata, spec)
        expected = reference_attention.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec)
        torch.testing.assert_close(actual, expected, atol=4e-6, rtol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    spec = _spec(scale=1e4)
    case = make_case([(1, 200), (4, 90)], spec, 8)
    assert build().paged_attention(case.q_THE, case.kv_cache, case.metadata, spec).isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(12, 0), (12, 4), (12, 12), (64, 64), (80, 32), (128, 128)])
def test_rope_kv_write(head_dim: int, rotary_dim: int, has_norm: bool, level: str) -> None:
    spec, generator = _spec(head_dim=head_dim), torch.Generator().manual_seed(3)
    positions_T, slots_T = torch.tensor([0, 3, 200, 17, 4]), torch.tensor([17, 0, 39, 8, 30])
    qkv_TX = torch.randn(5, 10 * head_dim, generator=generator)
    cos_sin_PR = torch.randn(256, rotary_dim, generator=generator) if rotary_dim else None
    norms = torch.randn(2, head_dim, generator=generator).unbind() if has_norm else (None, None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        caches = [torch.full((5, 3, 2, 2, 8, head_dim), float("nan"), dtype=dtype)[:, 1] for _ in range(2)]
        before = qkv_TX.clone()
        arguments = (positions_T, cos_sin_PR, *norms, 1e-5)
        with at_level(level):
            actual = build().rope_kv_write(qkv_TX, *arguments, caches[0], slots_T, spec)
        expected = reference_attention.rope_kv_write(qkv_TX, *arguments, caches[1], slots_T, spec)
        assert qkv_TX.equal(before) and actual.is_contiguous()
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-6)
        eps = max(torch.finfo(dtype).eps, 2e-6)
        torch.testing.assert_close(caches[0], caches[1], atol=eps, rtol=eps, equal_nan=True)
        values = caches[0][slots_T // 8, 1, :, slots_T % 8].float()
        assert values.equal(qkv_TX.view(5, 10, head_dim)[:, 8:].to(dtype).float())


def _decode_step(spec: AttentionSpec) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """qkv and a filled cache of three requests whose last token is to be written."""
    generator = torch.Generator().manual_seed(4)
    cache = torch.randn(30, 2, spec.num_kv_heads, 16, spec.head_dim, generator=generator)
    table_RB = torch.arange(30, dtype=torch.int32).view(3, 10)
    seq_lens = torch.tensor([1, 70, 160])
    slots_T = table_RB[torch.arange(3), (seq_lens - 1) // 16].long() * 16 + (seq_lens - 1) % 16
    metadata = AttentionMetadata(
        table_RB, slots_T, torch.arange(4, dtype=torch.int32), seq_lens.to(torch.int32), 3, 1, 160
    )
    return (
        torch.randn(3, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, generator=generator),
        cache,
        metadata,
    )


def test_rotation_fused_with_attention_gives_the_bits_of_both() -> None:
    spec, ops = _spec(head_dim=64, scale=0.125), build()
    assert ops.fused is not None
    qkv_TX, cache, metadata = _decode_step(spec)
    single, positions_T = cache.clone(), metadata.seq_lens_R.long() - 1
    rope = (positions_T, torch.randn(160, 64), None, None, 0.0)
    q_THE = ops.rope_kv_write(qkv_TX, *rope, single, metadata.slot_mapping_T, spec)
    expected = ops.paged_attention(q_THE, single, metadata, spec)
    assert ops.fused.rope_attention(qkv_TX, *rope, cache, metadata, spec).equal(expected)
    assert cache.equal(single)
