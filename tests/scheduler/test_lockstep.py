"""Data-parallel groups in lockstep: each takes every step, tokens are those of requests alone, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sonar.config import SchedulerConfig
from sonar.engine import Engine
from sonar.errors import ProtocolError
from sonar.kvcache.manager import KVCacheManager
from sonar.messages import BlockRemoved, BlockStored, StepBatch, StepResult, Submit
from sonar.sampling_params import SamplingParams
from sonar.scheduler.admission import RequestLimits
from sonar.scheduler.lockstep import LockstepScheduler
from sonar.scheduler.scheduler import Scheduler

from .fake_executor import EOS, VOCAB_SIZE, FakeExecutor
from .world import FULL, fault_free

CONFIG = SchedulerConfig(max_num_requests=3, max_step_tokens=12)
MAX_LEN = 40


class _Group(FakeExecutor):
    """A group's memory; counts the steps it joins without a request."""

    num_joined = 0

    def submit(self, batch: StepBatch) -> None:
        if batch.slots:
            super().submit(batch)
            return
        assert batch.step == self._next_step
        self._next_step += 1
        self.num_joined += 1
        self._apply(batch)
        self.results.append(StepResult(step=batch.step, token_ids=[]))


class _Groups:
    """An `Executor` of all groups."""

    def __init__(self, size: int) -> None:
        self.groups = [_Group((FULL,), (24,), 4, CONFIG.max_num_requests, CONFIG.max_step_tokens) for _ in range(size)]

    def submit(self, batch: StepBatch) -> _Groups:
        for group, own in zip(self.groups, [batch, *batch.others], strict=True):
            assert own.step == batch.step and (own is batch or not own.others)
            group.submit(own)
        return self

    def result(self) -> StepResult:
        first, *others = [group.results.popleft() for group in self.groups]
        return StepResult(step=first.step, token_ids=first.token_ids, logprobs=first.logprobs, others=others)

    def close(self) -> None:
        pass


def _make(size: int, num_stages: int = 1) -> tuple[Engine, _Groups, LockstepScheduler]:
    limits = RequestLimits(MAX_LEN, VOCAB_SIZE, frozenset({EOS}))
    caches = [KVCacheManager((FULL,), (24,), 4) for _ in range(size)]
    schedulers = [Scheduler(CONFIG, limits, cache, 7, num_stages) for cache in caches]
    scheduler, executor = LockstepScheduler(schedulers, caches), _Groups(size)
    return Engine(scheduler, executor, depth=scheduler.max_under_way, clock=lambda: 0.0), executor, scheduler


def _submit(number: int, prompt_len: int, max_tokens: int) -> Submit:
    prompt = [(3 * number + 7 * p) % (VOCAB_SIZE - 1) + 1 for p in range(prompt_len)]
    sampling = SamplingParams(seed=number, max_tokens=max_tokens)
    return Submit(incarnation=7, request_id=str(number), prompt_token_ids=prompt, sampling=sampling)


REQUESTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 15), st.integers(0, 6)), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(2, 4), st.integers(1, 3), st.integers(0, 8))
def test_each_request_gets_the_tokens_it_gets_alone(requests, size, num_stages, aborted):
    engine, executor, _ = _make(size, num_stages)
    waiting = [(_submit(i, length, most), after) for i, (length, most, after) in enumerate(requests)]
    got: dict[str, list[int]] = {}
    steps = 0
    while waiting or engine.has_work:
        for submit, after in list(waiting):
            if after <= steps:
                waiting.remove((submit, after))
                got[submit.request_id] = []
                assert engine.add(submit) is None
        if steps == 4 and engine.abort(str(aborted)) is not None:
            got.pop(str(aborted))
        for event in engine.step():
            got[event.request_id] += event.token_ids
        engine.check()
        steps += 1
    for request_id, tokens in got.items():
        length, most, _ = requests[int(request_id)]
        assert tokens == fault_free(_submit(int(request_id), length, most), MAX_LEN)[0]
    assert len({group._next_step for group in executor.groups}) == 1, "every group took every step"
    counts = engine.stats()
    assert counts.blocks_free + counts.blocks_cached == counts.blocks_total == 24 * size


def test_groups_share_requests_and_an_idle_one_joins():
    engine, executor, _ = _make(2)
    engine.add(_submit(0, 5, 6))
    while engine.has_work:
        engine.step()
    assert executor.groups[0].num_joined == 0
    assert executor.groups[1].num_joined == executor.groups[1]._next_step > 0
    assert engine.step() == [] and executor.groups[0]._next_step == executor.groups[1]._next_step, "idle: no step"
    for number in range(1, 5):
        engine.add(_submit(number, 5, 6))
    engine.step()
    assert [len(group._slots) for group in executor.groups] == [2, 2]


def test_a_request_goes_where_its_prompt_is_cached():
    engine, executor, scheduler = _make(2)
    engine.add(_submit(0, 5, 8))  # so that the first group is the busier one
    engine.add(_submit(1, 17, 1))
    while engine.has_work:
        engine.step()
    before = executor.groups[1].num_computed_tokens
    engine.add(_submit(1, 17, 1))
    engine.step()
    assert executor.groups[1].num_computed_tokens == before + 1, "all but the last token were found"
    with pytest.raises(ProtocolError, match="twice"):
        scheduler.add(_submit(1, 17, 1), 0.0)


def test_a_block_is_cached_as_long_as_one_group_has_it():
    engine, _, scheduler = _make(2)
    # The same prompt in both groups: it is told of once.
    for number in ("a", "b"):
        scheduler.add(
            Submit(incarnation=7, request_id=number, prompt_token_ids=list(range(1, 10)),
                   sampling=SamplingParams(seed=0, max_tokens=1)), 0.0)  # fmt: skip
    while engine.has_work:
        engine.step()
    stored = engine.take_kv_events()
    assert [type(event) for event in stored] == [BlockStored] * 2
    for number in range(12):  # prompts that push the old blocks out of one group, then of the other
        engine.add(_submit(number + 10, 20, 12))
        while engine.has_work:
            engine.step()
    removed = [event.block_hash for event in engine.take_kv_events() if isinstance(event, BlockRemoved)]
    assert all(removed.count(event.block_hash) <= 1 for event in stored)
