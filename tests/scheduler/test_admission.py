"""What is refused before it costs anything, and the facts fixed on arrival."""

from __future__ import annotations

from typing import Any

import pytest

from sonar.config import SchedulerConfig
from sonar.errors import CapacityError, ProtocolError, UserError
from sonar.messages import FinishReason, Submit
from sonar.sampling_params import SamplingParams
from sonar.scheduler.admission import RequestLimits, make_spec

from .fake_executor import EOS
from .world import World, sliding

LIMITS = RequestLimits(max_model_len=10, vocab_size=50, eos_token_ids=frozenset({0, 2}))


def _submit(prompt: list[int], emitted: list[int] | None = None, **sampling: Any) -> Submit:
    return Submit(
        incarnation=7,
        request_id="a",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"seed": 1, **sampling}),
        emitted_token_ids=emitted or [],
    )


@pytest.mark.parametrize(
    ("submit", "text", "param"),
    [
        (_submit([]), "no tokens", "prompt"),
        (_submit([1] * 10), "10 tokens and the context holds 10.*at most 9", "prompt"),
        (_submit([1, 50]), "token id 50.*0 to 49", "prompt"),
        (_submit([1, -1]), "token id -1", "prompt"),
        (_submit([1], [99]), "token id 99", "emitted_token_ids"),
        (_submit([1], n=2), "n=2", "n"),
        (_submit([1], seed=None), "seed", "seed"),
        (_submit([1], logit_bias={50: 1.0}), "token id 50", "logit_bias"),
        (_submit([1], bad_words=((3,), (4, 77))), "token id 77", "bad_words"),
    ],
)
def test_what_can_never_be_computed_is_refused_by_name(submit: Submit, text: str, param: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        make_spec(submit, LIMITS, 0, 0.0)
    assert caught.value.param == param


@pytest.mark.parametrize(("max_tokens", "max_total"), [(3, 7), (6, 10), (7, 10), (None, 10)])
def test_a_request_ends_at_max_tokens_or_at_the_contexts_end(max_tokens: int | None, max_total: int) -> None:
    assert make_spec(_submit([1] * 4, max_tokens=max_tokens), LIMITS, 0, 0.0).max_total == max_total


def test_stop_ids_are_the_models_and_the_requests_own() -> None:
    assert make_spec(_submit([1], stop_token_ids=(9,)), LIMITS, 0, 0.0).stop_token_ids == {0, 2, 9}
    assert make_spec(_submit([1], stop_token_ids=(9,), ignore_eos=True), LIMITS, 0, 0.0).stop_token_ids == {9}


def test_full_queue_refuses_with_figures_and_without_trace() -> None:
    world = World(config=SchedulerConfig(max_num_requests=4, max_step_tokens=16, max_waiting=2))
    world.request("a", [1])
    world.request("b", [1])
    with pytest.raises(CapacityError, match=r"2 requests are waiting.*max_waiting=2") as caught:
        world.request("c", [1])
    assert caught.value.code == "queue_full"
    assert world.scheduler.num_open == 2
    world.schedule()
    world.request("c", [1])
    world.finish_all()


def test_what_can_never_fit_the_cache_is_refused_even_if_its_prompt_would() -> None:
    world = World(num_blocks=(4,), max_model_len=64)
    fits = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    world.request("fits", [1] * 4, fits)
    too_long = SamplingParams(seed=1, max_tokens=13, ignore_eos=True)
    with pytest.raises(CapacityError, match=r"17 tokens need 5 blocks.*there are 4") as caught:
        world.request("too long", [1] * 4, too_long)
    assert caught.value.code == "kv_cache_too_small"
    world.finish_all()


def test_a_request_that_just_fits_its_window_is_computed() -> None:
    world = World(groups=(sliding(6),), num_blocks=(3,), max_model_len=64)
    client = world.request("a", list(range(1, 30)), SamplingParams(seed=1, max_tokens=20, ignore_eos=True))
    world.finish_all()
    assert client.finish is FinishReason.LENGTH
    # Found blocks and a window of new ones are more than there are: alone, it starts with what fits.
    again = world.request("b", [*range(1, 30), *client.output, *[9] * 8], SamplingParams(seed=1, max_tokens=2))
    world.finish_all()
    assert again.num_cached_tokens == 48


def test_an_open_id_is_not_taken_twice() -> None:
    world = World()
    client = world.request("a", [1])
    with pytest.raises(ProtocolError, match="a is submitted twice"):
        world.scheduler.add(client.submit, 0.0)
    world.finish_all()
    assert client.finish is FinishReason.LENGTH


def test_emitted_tokens_continue_the_count_and_the_numbers() -> None:
    world = World()
    client = world.request("a", [5, 6, 7], SamplingParams(seed=3, max_tokens=9, ignore_eos=True), num_emitted=4)
    batch = world.schedule()
    assert batch is not None and batch.admitted[0].token_ids == [5, 6, 7, *client.expected[:4]]
    assert batch.admitted[0].prompt_len == 3 and batch.samples == [True]
    (event,) = world.update()
    assert event.first == 4
    world.finish_all()
    assert len(client.output) == 9


def test_emitted_tokens_that_end_the_request_are_answered_at_once() -> None:
    world = World()
    by_length = world.request("a", [5], SamplingParams(seed=3, max_tokens=3, ignore_eos=True), num_emitted=3)
    assert by_length.finish is FinishReason.LENGTH
    stop = world.request("b", [5], SamplingParams(seed=3, max_tokens=30, ignore_eos=True)).expected[2]
    world.abort("b")
    sampling = SamplingParams(seed=3, max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    by_stop = world.request("c", [5], sampling, num_emitted=50)
    assert by_stop.finish is FinishReason.STOP and by_stop.output[-1] == stop
    assert world.scheduler.num_open == 0 and world.schedule() is None


def test_emitted_eos_counts_unless_it_is_ignored() -> None:
    world = World()
    ended = world.scheduler.add(_submit([5], [9, EOS]), 0.0)
    assert ended is not None and (ended.finish, ended.first, ended.stop_token_id) == (FinishReason.STOP, 2, EOS)
    assert world.scheduler.add(_submit([5], [9, EOS], ignore_eos=True), 0.0) is None
