"""A whole layer in one call against the single ops: equal bits, in batches of decodes and of prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sonar.config import ActivationMode
from sonar.ops.table import Activation, AttentionMetadata, AttentionSpec, LayerParts, OpTable
from tests.ops.cpu_case import LEVELS, at_level, build, random_matrix, with_threads

SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=32, scale=0.2)
HIDDEN, INTERMEDIATE, EPS = 96, 160, 1e-5


def _parts(ops: OpTable, spec: AttentionSpec, *, has_head_norms: bool) -> LayerParts:
    generator = torch.Generator().manual_seed(0)
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norms = torch.randn(2, HIDDEN, generator=generator).unbind()
    head_norms = torch.randn(2, spec.head_dim, generator=generator).unbind() if has_head_norms else (None, None)
    qkv = [random_matrix("Q4_1", q_size, HIDDEN), random_matrix("Q8_0", 2 * kv_size, HIDDEN)]
    return LayerParts(
        attention_norm_D=norms[0],
        mlp_norm_D=norms[1],
        norm_eps=EPS,
        qkv=ops.linear(qkv, torch.randn(q_size + 2 * kv_size, generator=generator)),
        output=ops.linear([random_matrix("Q5_0", HIDDEN, q_size)], None),
        cos_sin_PR=torch.randn(200, 24, generator=generator),
        q_norm_E=head_norms[0],
        k_norm_E=head_norms[1],
        head_norm_eps=1e-6,
        spec=spec,
        gate_up=ops.linear([random_matrix("Q4_0", 2 * INTERMEDIATE, HIDDEN)], None),
        down=ops.linear([random_matrix("Q5_1", HIDDEN, INTERMEDIATE)], torch.randn(HIDDEN, generator=generator)),
        activation=Activation.GELU_TANH,
    )


def _single_ops(
    ops: OpTable, parts: LayerParts, residual: Tensor, positions: Tensor, cache: Tensor, meta: AttentionMetadata
) -> None:
    qkv = parts.qkv(ops.rms_norm(residual, parts.attention_norm_D, EPS))
    norms = (parts.q_norm_E, parts.k_norm_E, parts.head_norm_eps)
    q = ops.rope_kv_write(qkv, positions, parts.cos_sin_PR, *norms, cache, meta.slot_mapping_T, parts.spec)
    x = parts.output(ops.paged_attention(q, cache, meta, parts.spec))
    x = ops.add_rms_norm(x, residual, parts.mlp_norm_D, EPS)
    residual.add_(parts.down(ops.gated_activation(parts.gate_up(x), parts.activation)))


def _step(lengths: list[tuple[int, int]]) -> tuple[Tensor, AttentionMetadata]:
    """Positions and metadata of requests (query tokens, sequence length), ten blocks of 16 each."""
    table = torch.arange(10 * len(lengths), dtype=torch.int32).view(-1, 10)
    positions = [torch.arange(seq_len - count, seq_len) for count, seq_len in lengths]
    slots = [table[row, place // 16].long() * 16 + place % 16 for row, place in enumerate(positions)]
    counts = [count for count, _ in lengths]
    metadata = AttentionMetadata(
        block_table_RB=table,
        slot_mapping_T=torch.cat(slots),
        query_start_R1=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        seq_lens_R=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
        num_decodes=sum(count == 1 for count in counts),
        max_query_len=max(counts),
        max_seq_len=max(seq_len for _, seq_len in lengths),
    )
    return torch.cat(positions), metadata


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["int8", "float32"])
@pytest.mark.parametrize("lengths", [[(1, 1)], [(1, 150)], [(1, 70), (1, 3), (9, 9), (30, 100)]], ids=str)
def test_a_layer_is_its_single_ops(lengths: list[tuple[int, int]], mode: ActivationMode, level: str) -> None:
    ops = build(mode)
    assert ops.fused is not None and ops.fused.layer is not None
    positions, metadata = _step(lengths)
    assert len(positions) <= ops.fused.max_layer_rows
    for spec, has_head_norms in ((SPEC, False), (replace(SPEC, window=20, softcap=3.0), True)):
        parts = _parts(ops, spec, has_head_norms=has_head_norms)
        caches = [
            torch.randn(10 * len(lengths), 2, 2, 16, 32, generator=torch.Generator().manual_seed(1)) for _ in range(2)
        ]
        residuals = [torch.randn(len(positions), HIDDEN, generator=torch.Generator().manual_seed(2)) for _ in range(2)]
        with at_level(level), with_threads(3):
            ops.fused.layer(parts)(residuals[0], positions, caches[0], metadata)
            _single_ops(ops, parts, residuals[1], positions, caches[1], metadata)
        assert residuals[0].equal(residuals[1]) and caches[0].equal(caches[1])


def test_parts_that_do_not_fit_are_refused() -> None:
    ops = build()
    assert ops.fused is not None and ops.fused.layer is not None
    parts = _parts(ops, SPEC, has_head_norms=False)
    with pytest.raises(ValueError, match="do not fit"):
        ops.fused.layer(replace(parts, down=parts.output))
