"""What goes into a step: budget, chunks, order, overlap, priority."""

from __future__ import annotations

import pytest

from sonar.config import SchedulerConfig
from sonar.messages import FinishReason, StepBatch, StepResult
from sonar.sampling_params import SamplingParams

from .world import World

MANY = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)


def _config(**values: int | bool) -> SchedulerConfig:
    return SchedulerConfig(**{"max_num_requests": 4, "max_step_tokens": 16, "overlap": False, **values})  # type: ignore[arg-type]


def _work(batch: StepBatch | None) -> list[tuple[int, int, int, bool]]:
    """(slot, start, length, samples) of each request."""
    assert batch is not None
    return list(zip(batch.slots, batch.starts, batch.lengths, batch.samples))


def _text(start: int, length: int) -> list[int]:
    """Tokens that share no block with those of another start."""
    return [(start * 7 + i) % 49 + 1 for i in range(length)]


def test_a_prompt_is_computed_in_chunks_and_drawn_from_at_its_end() -> None:
    world = World(config=_config())
    world.request("a", _text(0, 37))
    steps = []
    for _ in range(4):
        steps += _work(world.schedule())
        world.update()
    assert steps == [(0, 0, 16, False), (0, 16, 16, False), (0, 32, 5, True), (0, 37, 1, True)]


def test_decodes_come_first_and_share_the_budget_with_prompts() -> None:
    world = World(config=_config())
    world.request("a", _text(0, 3), MANY)
    world.request("b", _text(1, 3), MANY)
    world.step()
    world.request("c", _text(2, 40), MANY)
    assert _work(world.step()) == [(0, 3, 1, True), (1, 3, 1, True), (2, 0, 14, False)]


def test_a_chunk_of_one_token_stands_with_the_decodes() -> None:
    world = World(config=_config(max_step_tokens=8))
    world.request("a", _text(0, 2), MANY)
    world.step()
    world.request("b", _text(1, 6), MANY)
    world.request("c", _text(2, 6), MANY)
    assert _work(world.step()) == [(0, 2, 1, True), (2, 0, 1, False), (1, 0, 6, True)]


def test_begun_prompts_go_before_waiting_requests() -> None:
    world = World(config=_config())
    world.request("a", _text(0, 20), MANY)
    world.step()
    world.request("b", _text(1, 20), MANY, priority=-5)
    assert _work(world.step()) == [(0, 16, 4, True), (1, 0, 12, False)]


def test_waiting_requests_go_by_priority_then_arrival() -> None:
    world = World(config=_config(max_num_requests=1))
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        world.request(name, _text(ord(name[0]), 3), priority=priority)
    order = []
    while world.scheduler.num_open:
        world.schedule()
        order += [event.request_id for event in world.update() if event.finish]
    assert order == ["urgent", "first", "second", "late"]


def test_slots_bound_the_running_requests() -> None:
    world = World(config=_config(max_num_requests=2))
    for i in range(3):
        world.request(f"r{i}", _text(i, 2))
    assert len(_work(world.step())) == 2
    assert world.scheduler.stats(0.0).num_waiting == 1
    world.finish_all()


def test_released_slot_is_listed_in_the_batch_that_seats_the_next() -> None:
    world = World(config=_config(max_num_requests=1))
    world.request("a", _text(0, 2), SamplingParams(seed=1, max_tokens=1))
    world.request("b", _text(1, 2))
    world.step()
    batch = world.schedule()
    assert batch is not None and batch.released == [0] and [r.slot for r in batch.admitted] == [0]


def test_overlap_goes_on_by_a_placeholder_two_steps_deep() -> None:
    world = World(config=_config(overlap=True))
    world.request("a", _text(0, 3), MANY)
    assert _work(world.schedule()) == [(0, 0, 3, True)]
    assert _work(world.schedule()) == [(0, 3, 1, True)]
    assert world.schedule() is None and world.scheduler.num_under_way == 2
    (event,) = world.update()
    assert event.first == 0
    assert _work(world.schedule()) == [(0, 4, 1, True)]


def test_without_overlap_one_step_is_under_way() -> None:
    world = World(config=_config())
    world.request("a", _text(0, 3), MANY)
    world.schedule()
    assert world.schedule() is None
    world.update()
    assert world.schedule() is not None


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(3, 2), (62, None)])
def test_overlap_does_not_compute_past_a_certain_end(prompt_len: int, max_tokens: int | None) -> None:
    world = World(config=_config(overlap=True, max_step_tokens=64))
    client = world.request("a", _text(0, prompt_len), SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True))
    world.schedule()
    world.schedule()
    world.update()
    # One token is known and one under way: that is its last.
    assert world.schedule() is None
    world.update()
    assert client.finish is FinishReason.LENGTH and len(client.output) == 2
    assert world.executor.num_computed_tokens == prompt_len + 1


def test_overlap_drops_what_was_drawn_past_a_stop() -> None:
    world = World(config=_config(overlap=True))
    stop = world.request("probe", _text(0, 3), MANY).expected[1]
    world.abort("probe")
    sampling = SamplingParams(seed=1, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    client = world.request("a", _text(0, 3), sampling)
    world.schedule()
    world.schedule()
    world.update()
    world.schedule()
    (last,) = world.update()
    assert last.finish is FinishReason.STOP and last.stop_token_id == stop and last.token_ids == [stop]
    assert world.update() == []
    assert len(client.output) == 2
    world.finish_all()


def test_nothing_to_do_is_none() -> None:
    world = World()
    assert world.schedule() is None
    assert world.scheduler.stats(0.5).steps == 0


def test_a_result_out_of_order_is_caught() -> None:
    world = World(config=_config())
    world.request("a", _text(0, 3))
    world.schedule()
    with pytest.raises(AssertionError, match="result of step 5 while 0"):
        world.scheduler.update(StepResult(step=5, token_ids=[1]), 0.0)


def test_figures() -> None:
    world = World(config=_config())
    world.request("a", _text(0, 9), MANY)
    world.step()
    world.request("b", _text(0, 9))
    world.step()
    stats = world.scheduler.stats(0.25)
    assert (stats.incarnation, stats.steps, stats.step_seconds) == (7, 2, 0.25)
    assert (stats.num_running, stats.num_waiting, stats.preemptions) == (2, 0, 0)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (18, 8, 3)
    # a: 9 prompt tokens and one more in 3 blocks; b shares 2 of them and has 1 of its own.
    assert (stats.blocks_total, stats.blocks_in_use, stats.blocks_free, stats.blocks_cached) == (32, 4, 28, 0)
    world.finish_all()
    after = world.scheduler.stats(0.0)
    assert after.num_running == after.blocks_in_use == 0
    assert after.blocks_free + after.blocks_cached == after.blocks_total
    assert world.scheduler.totals.queue_seconds > 0 and world.scheduler.totals.first_token_seconds > 0
