"""A request can leave at any moment: waiting, between chunks, with one or two steps under way."""

from __future__ import annotations

import pytest

from sonar.config import SchedulerConfig
from sonar.messages import FinishReason
from sonar.sampling_params import SamplingParams

from .world import World

LONG = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)


def _world() -> World:
    return World(config=SchedulerConfig(max_num_requests=2, max_step_tokens=8))


@pytest.mark.parametrize("num_calls", range(7))
def test_all_blocks_come_back_at_once(num_calls: int) -> None:
    world = _world()
    client = world.request("a", list(range(1, 20)), LONG)
    for _ in range(num_calls):
        world.step()
    world.abort("a")
    assert client.finish is FinishReason.ABORT
    assert world.cache.counts().in_use == 0
    world.check()
    while world.executor.results:
        assert world.update() == []
    world.finish_all()


def test_blocks_of_an_aborted_request_serve_the_next_while_its_step_is_under_way() -> None:
    world = World(num_blocks=(5,), config=SchedulerConfig(max_num_requests=2, max_step_tokens=20))
    world.request("a", list(range(1, 17)), SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
    world.schedule()
    world.abort("a")
    after = world.request("b", list(range(20, 36)), SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
    batch = world.schedule()
    assert batch is not None and len(batch.admitted) == 1 and world.scheduler.num_under_way == 2
    world.finish_all()
    assert after.finish is FinishReason.LENGTH


def test_what_an_aborted_request_computed_is_found_by_others() -> None:
    world = _world()
    world.request("a", list(range(1, 20)), LONG)
    world.step()
    world.abort("a")
    other = world.request("b", list(range(1, 20)), LONG)
    world.finish_all()
    assert other.num_cached_tokens == 8


def test_unknown_and_finished_ids_are_ignored() -> None:
    world = _world()
    world.request("a", [1, 2])
    world.finish_all()
    assert world.scheduler.abort("a") is None
    assert world.scheduler.abort("never") is None


def test_the_head_says_how_it_ends() -> None:
    world = _world()
    world.request("a", [1, 2], LONG)
    world.schedule()
    world.update()
    event = world.scheduler.abort("a", FinishReason.STOP)
    assert event is not None
    assert (event.finish, event.first, event.token_ids, event.num_cached_tokens) == (FinishReason.STOP, 1, [], -1)
    assert event.stop_token_id is None
