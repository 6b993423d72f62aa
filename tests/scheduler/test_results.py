"""How a request ends, and what its events carry."""

from __future__ import annotations

import pytest

from sonar.config import LayerKind, SchedulerConfig
from sonar.kvcache.groups import CacheGroup
from sonar.kvcache.manager import KVCacheManager
from sonar.kvcache.request_blocks import RequestBlocks
from sonar.messages import FinishReason, Logprob, StepResult, Submit
from sonar.request import Request, RequestSpec
from sonar.sampling_params import SamplingParams
from sonar.scheduler.admission import RequestLimits
from sonar.scheduler.scheduler import Scheduler

from .world import World

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def _request(
    num_output: int, *, max_total: int = 20, min_tokens: int = 0, prompt_logprobs: int | None = None
) -> Request:
    sampling = SamplingParams(seed=0, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs)
    spec = RequestSpec("a", 4, max_total, frozenset({2}), sampling, 0)
    request = Request(spec, [9] * 4, RequestBlocks(1, b""))
    request.token_ids += [9] * num_output
    return request


@pytest.mark.parametrize(
    ("num_output", "token_id", "expected"),
    [(1, 9, None), (1, 2, STOP), (16, 9, LENGTH), (16, 2, STOP), (15, 9, None)],
)
def test_stop_ids_and_length(num_output: int, token_id: int, expected: FinishReason | None) -> None:
    assert _request(num_output).finish_at(token_id) is expected


@pytest.mark.parametrize(("num_output", "expected"), [(1, None), (3, None), (4, STOP)])
def test_a_stop_counts_once_min_tokens_were_out_before_it(num_output: int, expected: FinishReason | None) -> None:
    assert _request(num_output, min_tokens=3).finish_at(2) is expected


def test_length_ends_a_request_whatever_min_tokens_says() -> None:
    assert _request(6, max_total=10, min_tokens=9).finish_at(9) is LENGTH


def test_a_row_that_was_no_number_ends_its_request_with_an_error_and_no_token() -> None:
    limits = RequestLimits(64, 100, frozenset({2}))
    cache = KVCacheManager((CacheGroup(LayerKind.FULL, (0,)),), (32,), 8, enable_prefix_caching=True)
    scheduler = Scheduler(SchedulerConfig(max_num_requests=4, max_step_tokens=64), limits, cache)
    for name in "ab":
        scheduler.add(
            Submit(incarnation=0, request_id=name, prompt_token_ids=[5, 6], sampling=SamplingParams(seed=0)), 0.0
        )
    batch = scheduler.schedule(0.0)
    assert batch is not None
    bad, good = scheduler.update(StepResult(step=batch.step, token_ids=[-1, 7]), 0.0)
    assert (bad.finish, bad.token_ids) == (FinishReason.ERROR, []) and "not a number" in bad.error
    assert (good.finish, good.token_ids) == (None, [7]) and scheduler.num_open == 1
    scheduler.check()


def test_the_row_of_the_last_prompt_token_is_not_a_prompt_row() -> None:
    request = _request(0, prompt_logprobs=0)
    rows = [[Logprob(i, -1.0, 1)] for i in range(4)]
    request.collect_prompt_logprobs(0, rows[:2])
    request.collect_prompt_logprobs(2, rows[2:])
    assert request.event(9, [], None).prompt_logprobs == rows[:3]


def test_first_event_alone_carries_cached_tokens_and_prompt_rows() -> None:
    world = World(config=SchedulerConfig(max_num_requests=4, max_step_tokens=8, overlap=False))
    prompt = list(range(1, 20))
    world.request("warm", prompt)
    world.finish_all()
    hit = world.request("hit", prompt)
    # 19 tokens, 8 a step: the prefix cache is not read, so it takes 3 steps. World checks the rows.
    scored = world.request("scored", prompt, SamplingParams(seed=1, max_tokens=3, prompt_logprobs=1, logprobs=2))
    world.finish_all()
    assert (hit.num_cached_tokens, scored.num_cached_tokens) == (16, 0)
    assert scored.num_events == 3 and hit.num_events == 4


def test_a_resumed_request_sends_no_prompt_rows_again() -> None:
    world = World()
    sampling = SamplingParams(seed=1, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    world.request("a", [1, 2, 3, 4, 5, 6], sampling, num_emitted=2)
    batch = world.schedule()
    assert batch is not None and batch.admitted[0].sampling.prompt_logprobs is None
    world.finish_all()


def test_cached_tokens_of_a_resumed_request_count_the_prompt_only() -> None:
    world = World()
    sampling = SamplingParams(seed=1, max_tokens=14, ignore_eos=True)
    world.request("a", [1, 2, 3, 4, 5], sampling)
    world.finish_all()
    again = world.request("b", [1, 2, 3, 4, 5], sampling, num_emitted=12)
    world.finish_all()
    assert again.num_cached_tokens == 5
    assert world.scheduler.totals.cached_tokens == 5
