"""A row's bits depend on that row alone: not on its batch, the chunking, the threads or the instruction set level.

The levels with a fused multiply-add in hardware must agree bit for bit, so that a request may move between hosts; the
portable one rounds twice where a tie falls and is left out of that comparison.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonar.config import ActivationMode
from sonar.ops.table import Activation, AttentionMetadata, AttentionSpec, Matrix, OpTable, PlainMatrix
from tests.ops.cpu_case import LEVELS, at_level, build, random_matrix, with_threads
from tests.ops.paged_case import make_case

MODES: tuple[ActivationMode, ...] = ("int8", "float32")
FUSED_LEVELS = [level for level in LEVELS if level != "portable"]
MATRICES: dict[str, Matrix] = {
    name: random_matrix(name, 53, 1280 if name.endswith("_K") else 1120)
    for name in ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K")
}
PLAIN = PlainMatrix(torch.randn(53, 301, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16))


def _cut(num_rows: int, draw: random.Random) -> list[int]:
    """Sizes of random pieces."""
    sizes = []
    while num_rows:
        sizes.append(draw.randint(1, min(num_rows, draw.choice([1, 3, 20, 150]))))
        num_rows -= sizes[-1]
    return sizes


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_linear_rows_in_any_batch(mode: ActivationMode, level: str) -> None:
    draw, ops = random.Random(0), build(mode)
    with at_level(level):
        for matrix in (*MATRICES.values(), PLAIN):
            linear = ops.linear([matrix], None)
            x_TK = torch.randn(140, matrix.shape[1], generator=torch.Generator().manual_seed(0))
            whole = linear(x_TK)
            pieces = torch.cat([linear(piece) for piece in torch.split(x_TK, _cut(140, draw))])
            assert pieces.equal(whole)
            order = torch.randperm(140, generator=torch.Generator().manual_seed(1))
            assert linear(x_TK[order]).equal(whole[order])


@pytest.mark.parametrize("mode", MODES)
def test_linear_on_any_level_and_threads(mode: ActivationMode) -> None:
    ops = build(mode)
    for matrix in (*MATRICES.values(), PLAIN):
        linear, x_TK = ops.linear([matrix], None), torch.randn(37, matrix.shape[1])
        results = []
        for level in FUSED_LEVELS:
            for threads in (1, 2, 3):
                with at_level(level), with_threads(threads):
                    results.append(linear(x_TK))
        assert all(result.equal(results[0]) for result in results)


def _attend_in_chunks(
    ops: OpTable, seq_len: int, sizes: list[int], spec: AttentionSpec, cache: Tensor, q: Tensor
) -> Tensor:
    """A prompt's attention, some queries at a time, over a cache that already holds all keys."""
    table = torch.arange(cache.shape[0], dtype=torch.int32).flip(0).unsqueeze(0)
    out, done = [], 0
    for size in sizes:
        metadata = AttentionMetadata(
            block_table_RB=table,
            slot_mapping_T=torch.empty(0, dtype=torch.int64),
            query_start_R1=torch.tensor([0, size], dtype=torch.int32),
            seq_lens_R=torch.tensor([done + size], dtype=torch.int32),
            num_decodes=int(size == 1),
            max_query_len=size,
            max_seq_len=done + size,
        )
        out.append(ops.paged_attention(q[done : done + size], cache, metadata, spec))
        done += size
    assert done == seq_len
    return torch.cat(out)


@settings(max_examples=25, deadline=None)
@given(
    seq_len=st.integers(1, 300),
    seed=st.integers(0, 1 << 20),
    window=st.sampled_from([0, 0, 1, 17, 64, 100]),
    softcap=st.sampled_from([0.0, 0.0, 3.0]),
    heads=st.sampled_from([(6, 2), (4, 4), (7, 1)]),
    head_dim=st.sampled_from([16, 64, 80]),
    level=st.sampled_from(LEVELS),
)
def test_attention_in_any_chunking(
    seq_len: int, seed: int, window: int, softcap: float, heads: tuple[int, int], head_dim: int, level: str
) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    spec = AttentionSpec(*heads, head_dim, 0.2, window, softcap)
    cache = torch.randn(-(-seq_len // 16), 2, heads[1], 16, head_dim, generator=generator)
    q = torch.randn(seq_len, heads[0], head_dim, generator=generator)
    ops = build()
    with at_level(level):
        with with_threads(1):
            whole = _attend_in_chunks(ops, seq_len, [seq_len], spec, cache, q)
        for threads in (1, 2):
            with with_threads(threads):
                assert _attend_in_chunks(ops, seq_len, _cut(seq_len, draw), spec, cache, q).equal(whole)
                last = _attend_in_chunks(ops, seq_len, [seq_len - 1, 1] if seq_len > 1 else [1], spec, cache, q)
                assert last.equal(whole)


def test_long_decode_split_among_threads_keeps_its_bits() -> None:
    spec = AttentionSpec(6, 2, 64, 0.125)
    case, ops = make_case([(1, 3000)], spec, 16), build()
    results = []
    for level in FUSED_LEVELS:
        for threads in (1, 2, 3, 8):
            with at_level(level), with_threads(threads):
                results.append(ops.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec))
    assert all(result.equal(results[0]) for result in results)


def test_requests_do_not_see_each_other() -> None:
    spec, ops = AttentionSpec(6, 2, 64, 0.125), build()
    requests = [(1, 33), (1, 700), (1, 64), (5, 5), (120, 300), (2, 129)]
    case = make_case(requests, spec, 16)
    whole = ops.paged_attention(case.q_THE, case.kv_cache, case.metadata, spec)
    starts = case.metadata.query_start_R1.tolist()
    for index, (num_queries, seq_len) in enumerate(requests):
        rows = slice(starts[index], starts[index + 1])
        metadata = AttentionMetadata(
            block_table_RB=case.metadata.block_table_RB[index : index + 1],
            slot_mapping_T=case.metadata.slot_mapping_T,
            query_start_R1=torch.tensor([0, num_queries], dtype=torch.int32),
            seq_lens_R=torch.tensor([seq_len], dtype=torch.int32),
            num_decodes=int(num_queries == 1),
            max_query_len=num_queries,
            max_seq_len=seq_len,
        )
        assert ops.paged_attention(case.q_THE[rows], case.kv_cache, metadata, spec).equal(whole[rows])


@pytest.mark.parametrize("level", LEVELS)
def test_row_ops_in_any_batch_and_on_any_level(level: str) -> None:
    ops, generator = build(), torch.Generator().manual_seed(0)
    x_TD, weight_D = torch.randn(90, 577, generator=generator), torch.randn(577, generator=generator)
    gate_up, bias_D = torch.randn(90, 2 * 577, generator=generator), torch.randn(577, generator=generator)
    calls: dict[str, Callable[[slice], Tensor]] = {
        "rms": lambda rows: ops.rms_norm(x_TD[rows], weight_D, 1e-5),
        "layer": lambda rows: ops.layer_norm(x_TD[rows], weight_D, bias_D, 1e-5),
        **{
            kind.value: lambda rows, kind=kind: ops.gated_activation(gate_up[rows], kind)  # type: ignore[misc]
            for kind in Activation
        },
    }
    for call in calls.values():
        with at_level(level):
            whole = call(slice(None))
            assert torch.cat([call(slice(row, row + 1)) for row in range(90)]).equal(whole)
        if level in FUSED_LEVELS:
            assert call(slice(None)).equal(whole), "another level gives other bits"
