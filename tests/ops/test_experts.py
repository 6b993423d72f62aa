"""Mixtures of experts and latent attention: the reference against plain formulas, the CPU's bits in any batch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from sonar.ops.reference_matrix import dequantize_rows
from sonar.ops.registry import select_ops
from sonar.ops.table import (
    Activation,
    AttentionMetadata,
    AttentionSpec,
    ClampedSwiglu,
    GGUFMatrix,
    Matrix,
    OpTable,
    PlainMatrix,
    RoutingSpec,
    Scoring,
)
from tests.ops.cpu_case import random_matrix

CPU = torch.device("cpu")
BACKENDS = ("reference", "cpu")
SPECS = {
    "mixtral": RoutingSpec(8, 2, renormalize=True),
    "qwen2_moe": RoutingSpec(60, 4),
    "deepseek_v2": RoutingSpec(24, 3, scale=16.0, num_groups=8, top_groups=3),
    "deepseek_v3": RoutingSpec(32, 4, Scoring.SIGMOID, True, 2.5, num_groups=8, top_groups=4, group_best=2),
    "gpt_oss": RoutingSpec(32, 4, Scoring.SOFTMAX_OF_CHOSEN),
}


def _ops(backend: str) -> OpTable:
    torch.set_num_threads(1)
    return select_ops(CPU, torch.float32, backend)


def _route_one(logits: list[float], bias: list[float], spec: RoutingSpec) -> tuple[list[int], list[float]]:
    """One token's choice in plain Python, in float64."""
    numbers = torch.tensor(logits, dtype=torch.float64)
    match spec.scoring:
        case Scoring.SOFTMAX:
            scores = numbers.softmax(0).tolist()
        case Scoring.SIGMOID:
            scores = numbers.sigmoid().tolist()
        case Scoring.SOFTMAX_OF_CHOSEN:
            scores = logits
    choice = [score + more for score, more in zip(scores, bias, strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [choice[first : first + size] for first in range(0, spec.num_experts, size)]
    worth = [sum(sorted(group, reverse=True)[: spec.group_best]) for group in groups]
    best = sorted(range(spec.num_groups), key=lambda g: (-worth[g], g))[: spec.top_groups]
    allowed = [x for x in range(spec.num_experts) if x // size in best]
    ids = sorted(allowed, key=lambda x: (-choice[x], x))[: spec.top_k]
    weights = [scores[x] for x in ids]
    if spec.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = torch.tensor(weights, dtype=torch.float64).softmax(0).tolist()
    total = sum(weights) if spec.renormalize else 1.0
    return ids, [weight / total * spec.scale for weight in weights]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", SPECS)
def test_routing_is_its_formula_and_blind_to_the_batch(family: str, backend: str) -> None:
    ops, spec = _ops(backend), SPECS[family]
    generator = torch.Generator().manual_seed(4)
    logits_TX = torch.randn(67, spec.num_experts, generator=generator)
    has_bias = spec.scoring is Scoring.SIGMOID
    bias_X = torch.randn(spec.num_experts, generator=generator).mul_(0.2) if has_bias else None
    ids_TJ, weights_TJ = ops.route(logits_TX, bias_X, spec)
    for row in range(67):
        bias = [0.0] * spec.num_experts if bias_X is None else bias_X.tolist()
        ids, weights = _route_one(logits_TX[row].tolist(), bias, spec)
        assert ids_TJ[row].tolist() == ids
        torch.testing.assert_close(weights_TJ[row], torch.tensor(weights), atol=1e-5, rtol=1e-5)
        alone = ops.route(logits_TX[row : row + 1], bias_X, spec)
        assert alone[0][0].equal(ids_TJ[row]) and alone[1][0].equal(weights_TJ[row])


@pytest.mark.parametrize("family", SPECS)
def test_equal_scores_take_the_lower_id(family: str) -> None:
    spec = SPECS[family]
    ids_TJ, _ = _ops("cpu").route(torch.zeros(3, spec.num_experts), None, spec)
    assert ids_TJ.tolist() == [list(range(spec.top_k))] * 3


def _dense(matrix: Matrix) -> Tensor:
    if isinstance(matrix, GGUFMatrix):
        return dequantize_rows(matrix, 0, matrix.shape[0])
    return matrix.weight_NK.float()


def _experts(kind: str, num: int, rows: int, columns: int, seed: int) -> list[Matrix]:
    if kind != "plain":
        return [random_matrix(kind, rows, columns, seed + expert) for expert in range(num)]
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(rows, columns, generator=generator).mul_(0.05) for _ in range(num)]
    return [PlainMatrix(weight.to(torch.bfloat16)) for weight in drawn]


@pytest.mark.parametrize("kind", ["plain", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("unit", [Activation.SILU, ClampedSwiglu(1.702, 0.4)])
def test_experts_are_their_mlps(kind: str, unit: Activation | ClampedSwiglu) -> None:
    num, hidden, inner = 5, 256, 256
    gate, up = _experts(kind, num, inner, hidden, 10), _experts(kind, num, inner, hidden, 20)
    down = _experts(kind, num, hidden, inner, 30)
    generator = torch.Generator().manual_seed(1)
    first_bias, second_bias = torch.randn(num, 2 * inner, generator=generator), torch.randn(num, hidden)
    x_TD = torch.randn(23, hidden, generator=generator)
    ids_TJ = torch.rand(23, num, generator=generator).argsort(dim=1)[:, :3]
    ids_TJ[ids_TJ == 2] = 0  # nothing for one of them; an expert may be chosen twice
    weights_TJ = torch.rand(23, 3, generator=generator)
    expected = torch.zeros(23, hidden, dtype=torch.float64)
    for token in range(23):
        for expert, weight in zip(ids_TJ[token].tolist(), weights_TJ[token].tolist(), strict=True):
            x = x_TD[token].double()
            both = torch.cat((_dense(gate[expert]), _dense(up[expert]))).double() @ x + first_bias[expert]
            g, u = both.chunk(2)
            if isinstance(unit, ClampedSwiglu):
                g, u = g.clamp(max=unit.limit), u.clamp(-unit.limit, unit.limit)
                inside = (u + 1) * g * torch.sigmoid(unit.alpha * g)
            else:
                inside = torch.nn.functional.silu(g) * u
            expected[token] += weight * (_dense(down[expert]).double() @ inside + second_bias[expert])
    for backend in BACKENDS:
        ops = _ops(backend)
        experts = ops.experts([list(pair) for pair in zip(gate, up, strict=True)], down, unit, first_bias, second_bias)

        def mixed(rows: Tensor, ops: OpTable = ops, experts=experts) -> Tensor:
            order = ops.sort_by_expert(ids_TJ[rows], num)
            y_MD = experts(x_TD[rows].index_select(0, order.tokens_M), order.offsets_X1)
            return ops.weighted_sum(y_MD, order.places_TJ, weights_TJ[rows])

        whole = mixed(torch.arange(23))
        scale = float(expected.abs().max())
        torch.testing.assert_close(whole.double() / scale, expected / scale, atol=1e-5, rtol=0)
        if backend == "cpu":
            shuffled = torch.tensor(random.Random(0).sample(range(23), 23))
            assert mixed(shuffled).equal(whole[shuffled])
            assert torch.cat([mixed(piece) for piece in torch.arange(23).split(4)]).equal(whole)
        assert experts(x_TD[:0], torch.zeros(num + 1, dtype=torch.int32)).shape == (0, hidden)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_head_has_its_own_matrix(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_HNK, x_THX = torch.randn(6, 20, 16, generator=generator), torch.randn(9, 6, 24, generator=generator)
    linear = _ops(backend).head_linear([PlainMatrix(weight) for weight in weight_HNK])
    y_THN = linear(x_THX[..., :16])
    assert y_THN.is_contiguous()
    torch.testing.assert_close(y_THN, torch.einsum("thk,hnk->thn", x_THX[..., :16], weight_HNK), atol=1e-4, rtol=0)
    if backend == "cpu":
        assert torch.cat([linear(piece[..., :16]) for piece in x_THX.split(2)]).equal(y_THN)


@pytest.mark.parametrize(("num_heads", "dims"), [(4, (20, 8)), (16, (512, 64)), (128, (512, 64))])
def test_latent_attention_of_deepseek_sizes(num_heads: int, dims: tuple[int, int]) -> None:
    latent, rotated = dims
    size = latent + rotated
    spec = AttentionSpec(num_heads, 1, size, size**-0.5)
    cache = torch.randn(12, 1, 1, 8, size, generator=torch.Generator().manual_seed(0))
    metadata = AttentionMetadata(
        block_table_RB=torch.randperm(12, generator=torch.Generator().manual_seed(1)).view(2, 6).to(torch.int32),
        slot_mapping_T=torch.zeros(0, dtype=torch.int64),
        query_start_R1=torch.tensor([0, 1, 12], dtype=torch.int32),
        seq_lens_R=torch.tensor([21, 45], dtype=torch.int32),
        num_decodes=1,
        max_query_len=11,
        max_seq_len=45,
    )
    q_THX = torch.randn(12, num_heads, size, generator=torch.Generator().manual_seed(2))
    found = [_ops(backend).latent_attention(q_THX, cache, metadata, spec, latent) for backend in BACKENDS]
    for row, (request, end) in enumerate([(0, 21), *[(1, 35 + i) for i in range(11)]]):
        keys_CX = cache[metadata.block_table_RB[request].long(), 0, 0].flatten(0, 1)[:end]
        weights_HC = (q_THX[row] @ keys_CX.T * spec.scale).softmax(-1)
        for out_THC in found:
            torch.testing.assert_close(out_THC[row], weights_HC @ keys_CX[:, :latent], atol=2e-5, rtol=0)
