"""Every family split over ranks and stages computes what transformers does: logits of mixed prefill and decode."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sonar.config import ModelConfig
from sonar.distributed.shard_map import make_shard_map
from sonar.model_config_hf import read_hf_config
from sonar.models.registry import load_model
from sonar.ops.registry import select_ops
from sonar.weights.sharded_weights import ShardedWeights
from tests.distributed.thread_ranks import ThreadRank, run_ranks
from tests.models.dict_weights import DictWeights
from tests.models.paged_runner import PagedRunner
from tests.tiny import FAMILIES, VOCAB_SIZE, make_tiny_model

TOLERANCE = 1e-4
PROMPT_LENGTHS = (41, 6)


class Case(NamedTuple):
    """A family's weights, its shape, prompts and their logits by transformers."""

    reference: torch.nn.Module
    config: ModelConfig
    prompts: list[list[int]]
    expected: list[Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> Case:
    torch.set_num_threads(1)
    reference = make_tiny_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    reference.config.save_pretrained(folder)
    draw = random.Random(5)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    with torch.inference_mode():
        expected = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return Case(reference, read_hf_config(folder), prompts, expected)


class Stage:
    """One rank's part of the layers, with its cache."""

    def __init__(self, case: Case, parallel: ThreadRank | None, stage: tuple[int, int]) -> None:
        size, rank = (parallel.size, parallel.rank) if parallel else (1, 0)
        shard = make_shard_map(case.config, size, rank)
        config = shard.local_config(stage)
        weights = ShardedWeights(DictWeights(case.reference, torch.float32), shard)
        ops = replace(select_ops(torch.device("cpu"), torch.float32, "reference"), parallel=parallel)
        self.model = load_model(config, weights, ops)
        # The runner wants a model of its own layers alone.
        kinds = tuple(config.layer_kinds[layer] for layer in config.layers)
        self.runner = PagedRunner(self.model, replace(config, layer_kinds=kinds, num_layers=len(kinds), stage=None),
                                  torch.float32)  # fmt: skip


def logits_of(case: Case, parallel: ThreadRank | None, stages: list[tuple[int, int]]) -> list[Tensor]:
    parts = [Stage(case, parallel, stage) for stage in stages]
    first, second = case.prompts
    steps = [[(1, second[:3]), (0, first[:20])], [(1, [second[3]]), (0, first[20:])], [(1, [second[4]])],
             [(1, [second[5]])]]  # fmt: skip
    found: list[list[Tensor]] = [[], []]
    for step in steps:
        hidden = None
        for part in parts[:-1]:
            hidden = part.runner.hidden(step, hidden)
        last = parts[-1]
        hidden = last.runner.hidden(step, hidden)
        logits_TV = last.model.logits(hidden)
        if parallel is not None:
            logits_TV = parallel.gather_columns(logits_TV, case.config.vocab_size)
        if logits_TV is not None:
            for (request, _), rows in zip(step, logits_TV.split([len(tokens) for _, tokens in step])):
                found[request].append(rows)
    return [torch.cat(rows) for rows in found if rows]


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_tensor_parallel_logits(case: Case, tp_size: int) -> None:
    whole = [(0, case.config.num_layers)]
    actual, *others = run_ranks(tp_size, lambda rank: logits_of(case, rank, whole))
    assert others == [[]] * (tp_size - 1)
    for mine, expected in zip(actual, case.expected, strict=True):
        torch.testing.assert_close(mine, expected, atol=TOLERANCE, rtol=0)


def test_each_layer_sums_twice(case: Case) -> None:
    def count(rank: ThreadRank) -> int:
        logits_of(case, rank, [(0, case.config.num_layers)])
        return rank.num_sums

    num_steps = 4
    assert run_ranks(2, count) == [num_steps * (2 * case.config.num_layers + 1)] * 2


@pytest.mark.parametrize("cuts", [(2,), (1, 3), (1, 2, 3)])
def test_pipeline_stages_change_no_bit(case: Case, cuts: tuple[int, ...]) -> None:
    num_layers = case.config.num_layers
    ends = [0, *cuts, num_layers]
    staged = logits_of(case, None, list(itertools.pairwise(ends)))
    whole = logits_of(case, None, [(0, num_layers)])
    for mine, one, expected in zip(staged, whole, case.expected, strict=True):
        assert torch.equal(mine, one)
        torch.testing.assert_close(mine, expected, atol=TOLERANCE, rtol=0)


def test_both_at_once(case: Case) -> None:
    stages = [(0, 1), (1, case.config.num_layers)]
    actual, _ = run_ranks(2, lambda rank: logits_of(case, rank, stages))
    for mine, expected in zip(actual, case.expected, strict=True):
        torch.testing.assert_close(mine, expected, atol=TOLERANCE, rtol=0)
