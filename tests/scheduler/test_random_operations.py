"""Random operations over scheduler and cache: each step's reads are checked, each output equals the fault-free run."""

from __future__ import annotations

import random

import pytest

from sonar.config import SchedulerConfig
from sonar.errors import CapacityError
from sonar.kvcache.groups import CacheGroup
from sonar.sampling_params import SamplingParams

from .fake_executor import VOCAB_SIZE
from .world import FULL, World, sliding

OPERATIONS = 20_000
MAX_MODEL_LEN = 48

Layout = tuple[tuple[CacheGroup, ...], tuple[int, ...]]
ONLY_FULL: Layout = ((FULL,), (20,))
MIXED: Layout = ((sliding(6), FULL), (11, 20))
TIGHT_WINDOW: Layout = ((FULL, sliding(11)), (24, 6))
ONLY_SLIDING: Layout = ((sliding(9),), (10,))


def _prompt(rng: random.Random, shared: list[list[int]]) -> list[int]:
    """Often a prefix of one of few texts, so that requests meet in the cache; sometimes nothing anyone shares."""
    base = rng.choice(shared)
    prompt = base[: rng.randrange(len(base) + 1)] if rng.random() < 0.8 else []
    tail = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.choice((0, 0, 1, 3, 9)))]
    return (prompt + tail)[: MAX_MODEL_LEN - 1] or [1]


def _sampling(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice((1, 2, 5, 12, 40, None))
    return SamplingParams(
        seed=rng.randrange(3),
        max_tokens=max_tokens,
        min_tokens=min(rng.choice((0, 0, 4)), max_tokens or 4),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=(7,) if rng.random() < 0.3 else (),
        logprobs=rng.choice((None, None, 0)),
        prompt_logprobs=0 if rng.random() < 0.1 else None,
    )


def _submit(world: World, rng: random.Random, number: int, shared: list[list[int]]) -> None:
    try:
        world.request(
            f"r{number}",
            _prompt(rng, shared),
            _sampling(rng),
            num_emitted=rng.choice((0, 0, 0, 1, 3, 50)),
            priority=rng.choice((0, 0, 0, -1, 2)),
            salt=rng.choice(("", "", "", "tenant")),
        )
    except CapacityError as error:
        assert error.code == "queue_full"


@pytest.mark.parametrize(
    "layout", [ONLY_FULL, MIXED, TIGHT_WINDOW, ONLY_SLIDING], ids=["full", "mixed", "tight", "win"]
)
@pytest.mark.parametrize(("overlap", "caching"), [(True, True), (False, True), (True, False)])
def test_every_read_is_the_requests_own_history(layout: Layout, overlap: bool, caching: bool) -> None:
    groups, num_blocks = layout
    rng = random.Random(f"{num_blocks} {overlap} {caching}")
    world = World(
        groups=groups,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        config=SchedulerConfig(max_num_requests=4, max_step_tokens=10, max_waiting=8, overlap=overlap),
        caching=caching,
    )
    shared = [[rng.randrange(1, VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
    # The same blocks after another beginning: not the same prefix.
    shared.append([1, 2, 3, 4, *shared[0][4:]])
    for number in range(OPERATIONS):
        choice = rng.random()
        if choice < 0.12:
            _submit(world, rng, number, shared)
        elif choice < 0.15 and world.open:
            world.abort(rng.choice(world.open))
        elif choice < 0.55 and world.executor.results:
            world.update()
        else:
            world.schedule()
        if number % 5 == 0:
            world.check()
    world.finish_all()
    totals = world.scheduler.totals
    # The run must have met what it is meant to test.
    assert totals.generated_tokens > 1000
    assert totals.preemptions > 20
    assert (totals.cached_tokens > 100) == caching
