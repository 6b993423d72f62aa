"""When blocks run out: who gives way, who stands still, and that someone always goes on."""

from __future__ import annotations

from sonar.config import SchedulerConfig
from sonar.messages import AdmittedRequest, FinishReason
from sonar.sampling_params import SamplingParams

from .world import World, sliding


def _decoding(world: World, *names: str, prompt_len: int = 7, priority: int = 0) -> None:
    """Requests of 28 tokens in the end, each with a text of its own."""
    for name in names:
        prompt = [ord(name[0]) % 49 + 1, *range(1, prompt_len)]
        sampling = SamplingParams(seed=1, max_tokens=28 - prompt_len, ignore_eos=True, prompt_logprobs=None)
        world.request(name, prompt, sampling, priority=priority)


def _world(num_blocks: int, *, overlap: bool = False) -> World:
    config = SchedulerConfig(max_num_requests=4, max_step_tokens=32, overlap=overlap)
    return World(num_blocks=(num_blocks,), config=config)


def _running(world: World) -> list[str]:
    return [request.spec.request_id for request in world.scheduler._running]


def _until_preemption(world: World) -> None:
    while not world.scheduler.totals.preemptions:
        assert world.step() is not None


def test_the_latest_of_the_lowest_priority_gives_way() -> None:
    world = _world(10)
    _decoding(world, "a")
    _decoding(world, "b", priority=-1)
    _decoding(world, "c")
    _until_preemption(world)
    assert _running(world) == ["b", "a"]
    (waiting,) = world.scheduler._waiting
    assert waiting.spec.request_id == "c" and waiting.is_preempted
    world.finish_all()
    assert all(client.finish is FinishReason.LENGTH for client in world.clients.values())


def test_a_preempted_request_comes_before_new_ones_and_keeps_its_tokens() -> None:
    world = _world(8)
    _decoding(world, "a", "c")
    _until_preemption(world)
    known = world.clients["c"].submit.prompt_token_ids + world.clients["c"].output
    assert len(known) > 7
    _decoding(world, "d")
    admitted: list[AdmittedRequest] = []
    while not admitted:
        batch = world.step()
        admitted += batch.admitted if batch else []
    assert admitted[0].token_ids == known and admitted[0].prompt_len == 7
    world.finish_all()


def test_the_last_stands_still_rather_than_losing_its_work() -> None:
    world = _world(8)
    _decoding(world, "a", "b")
    ended = []
    while world.scheduler.num_open:
        world.schedule()
        ended += [event.request_id for event in world.update() if event.finish]
    # 14 blocks would be needed: b is last, so a takes its blocks and it is preempted once, not at each step.
    assert ended == ["a", "b"] and world.scheduler.totals.preemptions == 1
    world.finish_all()


def test_the_preempted_one_does_not_come_back_in_the_same_step() -> None:
    world = _world(10)
    _decoding(world, "a", "b", "c")
    while not world.scheduler.totals.preemptions:
        batch = world.step()
    assert batch is not None and batch.admitted == [] and len(batch.released) == 1
    world.finish_all()


def test_blocks_left_over_go_to_a_waiting_request_of_higher_priority() -> None:
    world = _world(10)
    _decoding(world, "a", "b", "c")
    while world.cache.counts().free > 1:
        world.step()
    # One block is left, spare for those that run.
    _decoding(world, "d", prompt_len=2, priority=-1)
    _until_preemption(world)
    assert _running(world) == ["d", "a", "b"]
    world.finish_all()


def test_admission_leaves_a_spare_block_to_those_that_run() -> None:
    world = _world(7)
    _decoding(world, "a", prompt_len=16)
    world.step()
    _decoding(world, "b", prompt_len=8)
    world.step()
    # a holds 5 of 7 blocks by now, and b would take both others.
    assert _running(world) == ["a"] and world.scheduler.totals.preemptions == 0


def test_one_request_can_use_every_block() -> None:
    world = _world(7, overlap=True)
    _decoding(world, "a", "b", "c", prompt_len=20)
    world.finish_all()
    assert [client.finish for client in world.clients.values()] == [FinishReason.LENGTH] * 3


def test_a_sliding_pool_too_small_for_a_whole_chunk_shortens_it() -> None:
    config = SchedulerConfig(max_num_requests=2, max_step_tokens=32)
    world = World(groups=(sliding(6),), num_blocks=(4,), config=config)
    _decoding(world, "a", prompt_len=25)
    batch = world.schedule()
    assert batch is not None and batch.lengths == [16]
    world.finish_all()


def test_a_request_alone_waits_for_blocks_in_transit_and_goes_on() -> None:
    world = _world(7, overlap=True)
    moving = world.cache.pools[0].take_in_transit(4)
    _decoding(world, "a")
    while world.step() is not None or world.executor.results:
        pass
    assert _running(world) == ["a"] and world.schedule() is None
    assert world.scheduler.totals.preemptions == 0
    world.cache.pools[0].drop_in_transit(moving)
    world.finish_all()
    assert world.clients["a"].finish is FinishReason.LENGTH


def test_prompt_rows_are_collected_anew_after_a_preemption() -> None:
    world = World(num_blocks=(10,), config=SchedulerConfig(max_num_requests=4, max_step_tokens=4, overlap=False))
    _decoding(world, "a", prompt_len=6)
    world.step()
    world.step()
    sampling = SamplingParams(seed=2, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    world.request("b", list(range(1, 26)), sampling)
    world.finish_all()
    # It lost its blocks between two chunks. World checks that each row is there once, of the right history.
    assert world.scheduler.totals.preemptions == 1
    assert world.scheduler.totals.prompt_tokens == 6 + 25
