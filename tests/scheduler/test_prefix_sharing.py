"""Prefixes are computed once: by hits on earlier steps' blocks, and by waiting for a step that computes them."""

from __future__ import annotations

import pytest

from sonar.config import SchedulerConfig
from sonar.kvcache.groups import CacheGroup
from sonar.messages import AdmittedRequest, BlockStored
from sonar.sampling_params import SamplingParams

from .world import FULL, World, sliding

SHARED = [3 + i % 40 for i in range(40)]
ONE = SamplingParams(seed=1, max_tokens=1)


def _world(*, groups: tuple[CacheGroup, ...] = (FULL,), slots: int = 16, overlap: bool = True) -> World:
    config = SchedulerConfig(max_num_requests=slots, max_step_tokens=32, overlap=overlap)
    return World(groups=groups, num_blocks=(200,) * len(groups), config=config)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, sliding(6))], ids=["full", "mixed"])
@pytest.mark.parametrize("overlap", [True, False])
def test_many_clients_with_one_prefix_compute_it_once(groups: tuple[CacheGroup, ...], overlap: bool) -> None:
    world = _world(groups=groups, overlap=overlap)
    for i in range(12):
        world.request(f"r{i}", [*SHARED, 45, i + 1], ONE)
    world.finish_all()
    assert world.executor.num_computed_tokens == 42 + 11 * 2
    assert [client.num_cached_tokens for client in world.clients.values()] == [0] + [40] * 11


def test_a_follower_waits_only_while_its_next_block_is_computed() -> None:
    world = _world(overlap=False)
    world.request("leader", [*SHARED, 45, 46], ONE)
    world.request("same", [*SHARED, 45, 47], ONE)
    world.request("short", [*SHARED[:16], 48], ONE)
    world.request("fork", [*SHARED[:24], *SHARED[:14]], ONE)
    world.request("other", [49] * 6, ONE)
    assert [len(r.token_ids) for r in _admitted(world)] == [42]
    # The leader has computed 32 tokens: "short" and "fork" have all they share, "same" waits for the rest.
    assert [len(r.token_ids) for r in _admitted(world)] == [17, 38, 6]
    assert [len(r.token_ids) for r in _admitted(world)] == [42]
    world.finish_all()
    assert world.clients["short"].num_cached_tokens == 16
    assert world.clients["fork"].num_cached_tokens == 24
    assert world.clients["same"].num_cached_tokens == 40


def test_followers_do_not_wait_for_a_leader_that_left() -> None:
    world = _world(overlap=False)
    world.request("leader", [*SHARED, 45], ONE)
    follower = world.request("follower", [*SHARED, 46], ONE)
    world.schedule()
    world.abort("leader")
    world.update()
    batch = world.schedule()
    assert batch is not None and batch.starts == [32]
    world.finish_all()
    assert follower.num_cached_tokens == 32


def test_no_waiting_for_a_block_that_could_not_be_used_whole() -> None:
    world = _world()
    world.request("leader", SHARED[:8], ONE)
    world.request("equal", SHARED[:4], ONE)
    # Four tokens are one block, but the last token must be computed in any case.
    assert [len(r.token_ids) for r in _admitted(world)] == [8, 4]
    world.finish_all()


def test_other_salt_and_scored_prompts_neither_wait_nor_hit() -> None:
    world = _world()
    world.request("leader", SHARED[:8], ONE)
    world.request("salted", SHARED[:9], ONE, salt="x")
    world.request("scored", SHARED[:10], SamplingParams(seed=1, max_tokens=1, prompt_logprobs=0))
    assert [len(r.token_ids) for r in _admitted(world)] == [8, 9, 10]
    world.finish_all()
    assert {client.num_cached_tokens for client in world.clients.values()} == {0}


def test_a_later_turn_finds_the_output_of_the_earlier_one() -> None:
    world = _world()
    first = world.request("one", SHARED[:10], SamplingParams(seed=1, max_tokens=12, ignore_eos=True))
    world.finish_all()
    second = world.request("two", [*SHARED[:10], *first.output, 5, 6], ONE)
    world.finish_all()
    # 10 + 12 tokens, the last of which was drawn but never computed.
    assert second.num_cached_tokens == 20


def test_events_name_the_chain_of_cached_blocks() -> None:
    world = _world()
    world.request("a", SHARED[:9], ONE)
    world.schedule()
    first, second = world.scheduler.take_kv_events()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert second.parent_hash == first.block_hash
    assert world.scheduler.take_kv_events() == []


def _admitted(world: World) -> list[AdmittedRequest]:
    batch = world.schedule()
    assert batch is not None
    world.update()
    return batch.admitted
