"""What the rank processes of `rank_pool` are told to do; each returns plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sonar.config import EngineConfig
from sonar.distributed.expert_balance import ExpertBalance
from sonar.distributed.expert_exchange import ExpertRanks
from sonar.distributed.rank_link import RankLink
from sonar.engine import build_engine, build_follower
from sonar.ops.reference_experts import weighted_sum as reference_weighted_sum
from sonar.ops.reference_sample import sample as reference_sample
from sonar.ops.table import SamplingTensors
from sonar.worker.ranks import Ranks
from sonar.worker.shared_sampler import SharedSampler
from sonar.worker.slots import SlotTable
from tests.worker.request_mix import everything, run


def requests(config: EngineConfig, link: RankLink) -> Any:
    """Serves the requests of the equality tests; the lead returns their outputs, the others their number of steps."""
    if config.parallel.rank:
        loop = build_follower(config, link=link)
        loop.run()
        return loop.num_steps
    built = build_engine(config, link=link, incarnation=link.spec.incarnation)
    outputs = run(built.engine, everything())
    steps = built.engine.stats().steps
    built.engine.close()
    return {name: (output.tokens, output.alternatives) for name, output in outputs.items()}, steps


def sums(config: EngineConfig, link: RankLink) -> Any:
    """Whether sums are right, alike on all ranks, and blind to where an element lies; what was counted."""
    rank, size = config.parallel.tp_rank, config.parallel.tp_size
    ranks = Ranks(link, config.parallel, torch.device("cpu"))
    tensor = ranks.groups.tensor
    assert tensor is not None
    seen = []
    for num_rows in (1, 7, 300):  # the last goes the long way round
        generator = torch.Generator().manual_seed(3)
        parts = torch.randn(size, 1, 193, generator=generator).expand(size, num_rows, 193)
        total = tensor.sum(parts[rank].clone())
        ordered = parts[0].clone()
        for part in parts[1:]:
            ordered = ordered + part
        assert torch.equal(total, ordered), num_rows
        seen.append(total[-1].tolist())
    assert seen[0] == seen[1] == seen[2]
    columns = tensor.vocabulary(50)
    whole = torch.arange(100.0).reshape(2, 50)
    gathered = tensor.gather_columns(whole[:, columns[0] : columns[1]], 50)
    assert (gathered is None) == (rank != 0) and (gathered is None or torch.equal(gathered, whole))
    assert tensor.broadcast(torch.full((3,), rank)).tolist() == [0, 0, 0]
    pairs = tensor.gather_pairs(torch.full((2, 2), float(rank)))
    assert pairs[:, 0, 0].tolist() == list(range(size))
    facts = ranks.groups.gather_numbers([rank, 7])
    ranks.groups.close()
    return seen[0], facts, dataclasses.asdict(tensor.counts)


def experts(config: EngineConfig, link: RankLink) -> Any:
    """Whether tokens come back from experts on other ranks as from one rank, with uneven numbers of tokens, before and
    after experts have moved; how even the load became, what was moved and sent."""
    parallel = config.parallel
    ranks = Ranks(link, parallel, torch.device("cpu"))
    assert ranks.groups.experts is not None
    shared = ExpertRanks(
        ranks.groups.experts,
        ranks.groups.tensor,
        reference_weighted_sum,
        torch.device("cpu"),
        parallel.redundant_experts,
    )
    layers = [_ScaledLayer(shared, index) for index in range(2)]
    balance = ExpertBalance(shared, parallel.rebalance_steps)
    seen = []
    for step in range(40):
        balance.before_step(step)
        for index, layer in enumerate(layers):
            # The ranks of a tensor-parallel group hold the same tokens; a group may have none.
            layer.check(seed=100 * step + 10 * index + parallel.group, num_tokens=(step + 3 * parallel.group) % 7)
        seen.append(balance.worst_imbalance)
    counts = dataclasses.asdict(shared.counts)
    ranks.groups.close()
    return seen, balance.num_moved, counts


NUM_EXPERTS = 6


class _ScaledLayer:
    """Experts that multiply by a number of their own, so that each row's bits are known."""

    def __init__(self, shared: ExpertRanks, index: int) -> None:
        self._exchange = shared.exchange(index, NUM_EXPERTS)
        self._scales_X = torch.linspace(0.3, 1.7, NUM_EXPERTS) + index
        self._own_SK = self._scales_X[list(self._exchange.slots)].unsqueeze(1).repeat(1, 3)
        self._exchange.adopt([self._own_SK])

    def check(self, seed: int, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        hidden_TD = torch.randn(num_tokens, 5, generator=generator)
        skew_X = torch.tensor([1.0, 1.0, 30.0, 1.0, 30.0, 1.0]).expand(num_tokens, -1)
        ids_TJ = torch.multinomial(skew_X, 2, generator=generator) if num_tokens else torch.empty(0, 2).long()
        weights_TJ = torch.rand(num_tokens, 2, generator=generator)
        arrived = self._exchange.dispatch(hidden_TD, ids_TJ, weights_TJ)
        sizes = arrived.offsets_X1.diff()
        assert arrived.offsets_X1[-1] == arrived.x_MD.shape[0] and arrived.offsets_X1.dtype == torch.int32
        got_TD = arrived.combine(arrived.x_MD * self._own_SK[:, :1].repeat_interleave(sizes, dim=0))
        first, second = (
            hidden_TD * self._scales_X[ids_TJ[:, j]].unsqueeze(1) * weights_TJ[:, j : j + 1] for j in (0, 1)
        )
        assert torch.equal(got_TD, first + second)


def draws(config: EngineConfig, link: RankLink) -> Any:
    """Tokens drawn from columns spread over the ranks, for many keys and two temperatures, greedy rows between."""
    ranks = Ranks(link, config.parallel, torch.device("cpu"))
    tensor = ranks.groups.tensor
    assert tensor is not None
    logits_SV, settings = draw_case()
    slots = SlotTable(num_slots=1, max_model_len=8, block_size=8, num_groups=1, device=torch.device("cpu"))
    shared = SharedSampler(None, slots, reference_sample, logits_SV.shape[1], tensor)  # type: ignore[arg-type]
    first, last = tensor.vocabulary(logits_SV.shape[1])
    token_S = shared._draw_apart(logits_SV[:, first:last].contiguous(), settings, None)
    ranks.groups.close()
    return token_S.tolist()


def draw_case() -> tuple[torch.Tensor, SamplingTensors]:
    """Logits of 400 rows over 301 tokens, some of them equal, and settings without filters."""
    generator = torch.Generator().manual_seed(9)
    logits_SV = torch.randn(400, 301, generator=generator).mul(2).round(decimals=1)
    keys_S2 = torch.randint(0, 2**32, (400, 2), generator=generator)
    temperature_S = torch.tensor([0.0, 0.7, 1.0, 1.9]).repeat(100)
    off = torch.ones(400)
    return logits_SV, SamplingTensors(
        temperature_S, torch.zeros(400, dtype=torch.int32), off, torch.zeros(400), off, keys_S2, False, False
    )
