"""Scheduling for a pipeline: as many steps under way as stages, and no request in two of them that draw for it."""

from __future__ import annotations

import random

import pytest

from sonar.config import SchedulerConfig
from sonar.sampling_params import SamplingParams

from .world import FULL, World, sliding


def make_world(num_stages, **options):
    config = SchedulerConfig(max_num_requests=8, max_step_tokens=16)
    return World(config=config, num_blocks=(64,), num_stages=num_stages, **options)


def run_checked(world, num_stages, before_step=lambda: None):
    """Runs to the end; the slots drawn for in steps whose results are not in, step by step."""
    drawing = []
    sizes = []
    while world.scheduler.num_open or world.executor.results:
        before_step()
        batch = world.schedule()
        if batch is not None:
            drawn = {slot for slot, is_drawn in zip(batch.slots, batch.samples) if is_drawn}
            admitted = {request.slot for request in batch.admitted}
            for others in drawing:
                assert not (others - admitted) & set(batch.slots), "its token is not known yet"
            drawing.append(drawn)
            sizes.append(len(drawn))
        assert len(world.executor.results) <= num_stages
        if batch is None or len(world.executor.results) == num_stages:
            world.update()
            drawing.pop(0)
    world.finish_all()
    return sizes


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_requests_are_shared_out_over_the_stages(num_stages):
    world = make_world(num_stages)
    for n in range(8):
        world.request(str(n), [n + 1, 2], SamplingParams(seed=n, max_tokens=30, ignore_eos=True))
    sizes = run_checked(world, num_stages)
    steady = sizes[2 * num_stages : -2 * num_stages - 4]
    assert set(steady) <= {8 // num_stages, -(-8 // num_stages), 8 - (num_stages - 1) * -(-8 // num_stages)}, sizes
    assert world.scheduler.totals.generated_tokens == 8 * 30


def test_one_request_goes_on_token_by_token():
    world = make_world(3)
    world.request("a", [1, 2, 3])
    assert run_checked(world, 3) == [1, 1, 1, 1]


def test_chunks_of_one_prompt_fill_the_pipeline():
    world = make_world(3, max_model_len=128)
    world.request("long", list(range(1, 49)), SamplingParams(seed=1, max_tokens=1, ignore_eos=True))
    batches = [world.schedule() for _ in range(4)]
    assert [batch and batch.lengths for batch in batches] == [[16], [16], [16], None]
    world.finish_all()


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_gives_the_fault_free_tokens(num_stages, seed):
    """Tight memory (preemptions), aborts, arrivals at any time; the world checks every token."""
    chance = random.Random(seed)
    groups = (FULL, sliding(6)) if seed % 2 else (FULL,)
    config = SchedulerConfig(max_num_requests=5, max_step_tokens=9)
    world = World(groups=groups, num_blocks=(18,) * len(groups), config=config, num_stages=num_stages)
    numbers = iter(range(30))

    def happen():
        number = next(numbers, None) if chance.random() < 0.4 else None
        if number is not None:
            prompt = [(p * 7 + number % 3) % 40 + 1 for p in range(chance.randint(1, 30))]
            world.request(str(number), prompt, SamplingParams(seed=number, max_tokens=chance.randint(1, 20)))
        if world.open and chance.random() < 0.05:
            world.abort(chance.choice(world.open))

    for _ in range(120):
        happen()
        world.step()
    world.finish_all()
    assert len(world.clients) == 30 and all(client.finish for client in world.clients.values())
