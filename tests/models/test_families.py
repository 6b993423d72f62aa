"""Each family's logits against transformers: whole and chunked prefill, paged decode, several requests in a step."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sonar.config import LayerKind, ModelConfig
from sonar.model_config_hf import read_hf_config
from sonar.models.registry import load_model
from sonar.ops.registry import select_ops
from tests.models.dict_weights import DictWeights
from tests.models.paged_runner import PagedRunner
from tests.tiny import FAMILIES, VOCAB_SIZE, make_tiny_model

TOLERANCE = 1e-4
SEQ_LENS = (71, 5, 40, 33)


class Case(NamedTuple):
    """A family's transformers model, its config as read from the folder, and logits_TV of each prompt."""

    reference: PreTrainedModel
    config: ModelConfig
    prompts: list[list[int]]
    expected: list[Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    reference = make_tiny_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    reference.config.save_pretrained(folder)
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in SEQ_LENS]
    with torch.inference_mode():
        expected = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return Case(reference, read_hf_config(folder), prompts, expected)


def _runner(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PagedRunner:
    weights = DictWeights(case.reference, dtype, device)
    model = load_model(case.config, weights, select_ops(torch.device(device), dtype, "reference"))
    return PagedRunner(model, case.config, dtype, device)


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_the_case_can_tell_errors(case: Case) -> None:
    longest = max(SEQ_LENS)
    assert case.expected[0].std() > 0.5, "logits are too flat to find an error"
    if LayerKind.SLIDING in case.config.layer_kinds:
        assert 2 * case.config.sliding_window < longest


def test_whole_prefill(case: Case) -> None:
    (actual,) = _runner(case).step([(0, case.prompts[0])])
    _assert_close(actual, case.expected[0])


def test_prefill_in_uneven_chunks(case: Case) -> None:
    runner = _runner(case)
    actual, start = [], 0
    for length in (7, 1, 20, 3, 40):
        actual += runner.step([(0, case.prompts[0][start : start + length])])
        start += length
    assert start == SEQ_LENS[0]
    _assert_close(torch.cat(actual), case.expected[0])


def test_mixed_prefill_and_decode_of_several_requests(case: Case) -> None:
    _assert_mixed_steps_agree(case, _runner(case))


@pytest.mark.gpu
def test_mixed_steps_on_a_gpu(case: Case) -> None:
    _assert_mixed_steps_agree(case, _runner(case, device="cuda"))


def _assert_mixed_steps_agree(case: Case, runner: PagedRunner) -> None:
    """Every request advances by a random number of tokens, now alone, now beside others."""
    actual: list[list[Tensor]] = [[] for _ in SEQ_LENS]
    done = [0] * len(SEQ_LENS)
    draw = random.Random(2)
    while any(done[r] < SEQ_LENS[r] for r in range(len(SEQ_LENS))):
        open_requests = [r for r in range(len(SEQ_LENS)) if done[r] < SEQ_LENS[r]]
        chosen = draw.sample(open_requests, draw.randint(1, len(open_requests)))
        lengths = {r: min(draw.choice((1, 1, 1, 2, 9, 25)), SEQ_LENS[r] - done[r]) for r in chosen}
        chosen.sort(key=lambda r: lengths[r] > 1)
        for r, logits_TV in zip(
            chosen, runner.step([(r, case.prompts[r][done[r] : done[r] + lengths[r]]) for r in chosen]), strict=True
        ):
            actual[r].append(logits_TV)
            done[r] += lengths[r]
    for request, expected in enumerate(case.expected):
        _assert_close(torch.cat(actual[request]).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(case: Case, dtype: torch.dtype) -> None:
    runner = _runner(case, dtype)
    actual = torch.cat(
        runner.step([(0, case.prompts[0][:40])]) + [runner.step([(0, [t])])[0] for t in case.prompts[0][40:44]]
    )
    assert actual.dtype == torch.float32
    expected = case.expected[0][:44]
    similarity = torch.nn.functional.cosine_similarity(actual, expected, dim=-1)
    assert similarity.min() > 0.97, similarity
