"""What the rank processes of `rank_pool` are told to do; each returns plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sonar.config import EngineConfig
from sonar.distributed.rank_link import RankLink
from sonar.engine import build_engine, build_follower
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
