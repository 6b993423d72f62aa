"""The engine loop around an executor that computes no numbers but checks every read of the KV memory."""

from __future__ import annotations

import itertools

import pytest

from sonar.config import LayerKind, SchedulerConfig
from sonar.engine import Engine
from sonar.errors import ProtocolError, UserError
from sonar.kvcache.groups import CacheGroup
from sonar.kvcache.manager import KVCacheManager
from sonar.messages import BlockStored, FinishReason, Submit
from sonar.sampling_params import SamplingParams
from sonar.scheduler.admission import RequestLimits
from sonar.scheduler.scheduler import Scheduler
from tests.scheduler.fake_executor import EOS, VOCAB_SIZE, FakeExecutor
from tests.scheduler.world import fault_free

GROUPS = (CacheGroup(LayerKind.FULL, (0, 1)), CacheGroup(LayerKind.SLIDING, (2,), 8))
MAX_LEN = 64
BLOCK = 4


class LazyExecutor:
    """An `Executor` over the fake; a step counts as done only when its result is asked for. `log` tells the order."""

    def __init__(self, max_num_requests, max_step_tokens, num_blocks, failing_step=None):
        self.fake = FakeExecutor(GROUPS, num_blocks, BLOCK, max_num_requests, max_step_tokens)
        self.log = []
        self.failing_step = failing_step
        self.is_closed = False

    def submit(self, batch):
        self.fake.submit(batch)
        self.log.append(("submit", batch.step))
        return Handle(self, batch.step, self.fake.results.popleft())

    def close(self):
        self.is_closed = True


class Handle:
    def __init__(self, executor, step, result):
        self.executor, self.step, self.value = executor, step, result

    def result(self):
        if self.step == self.executor.failing_step:
            raise ArithmeticError("rank 0")
        self.executor.log.append(("result", self.step))
        return self.value


def make_engine(*, overlap=True, num_blocks=(40, 40), failing_step=None, clock=None, **limits):
    config = SchedulerConfig(**{"max_num_requests": 4, "max_step_tokens": 12, "overlap": overlap, **limits})
    cache = KVCacheManager(GROUPS, num_blocks, BLOCK)
    scheduler = Scheduler(config, RequestLimits(MAX_LEN, VOCAB_SIZE, frozenset({EOS})), cache)
    executor = LazyExecutor(config.max_num_requests, config.max_step_tokens, num_blocks, failing_step)
    ticks = itertools.count()
    return Engine(
        scheduler, executor, depth=scheduler.max_under_way, clock=clock or (lambda: float(next(ticks)))
    ), executor


def request(name, prompt_len=9, emitted=(), **sampling):
    prompt = [(len(name) * 7 + ord(name[-1]) + 3 * p) % (VOCAB_SIZE - 1) + 1 for p in range(prompt_len)]
    params = SamplingParams(**{"seed": ord(name[-1]), "max_tokens": 9, **sampling})
    return Submit(
        incarnation=0, request_id=name, prompt_token_ids=prompt, sampling=params, emitted_token_ids=list(emitted)
    )


def run(engine, outputs=None):
    """Steps until nothing is left; {id: (tokens, finish)}; every event is numbered without a gap."""
    outputs = {} if outputs is None else outputs
    steps = 0
    while engine.has_work:
        for event in engine.step():
            tokens, finish = outputs.setdefault(event.request_id, ([], None))
            assert finish is None and event.first == len(tokens)
            outputs[event.request_id] = (tokens + event.token_ids, event.finish)
        steps += 1
        assert steps < 1000, "the engine makes no progress"
    engine.check()
    counts = engine.stats()
    assert counts.blocks_in_use == 0
    assert counts.blocks_free + counts.blocks_cached == counts.blocks_total
    return outputs


def expected(*submits):
    return {submit.request_id: fault_free(submit, MAX_LEN) for submit in submits}


MIX = [request(f"r{i}", prompt_len=3 + 5 * (i % 4), max_tokens=4 + 3 * i) for i in range(7)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_blocks", "max_step_tokens"), [((40, 40), 12), ((15, 30), 7), ((40, 12), 4)])
def test_outputs_do_not_depend_on_overlap_chunks_or_memory(overlap, num_blocks, max_step_tokens):
    engine, _ = make_engine(overlap=overlap, num_blocks=num_blocks, max_step_tokens=max_step_tokens)
    for submit in MIX:
        assert engine.add(submit) is None
    assert run(engine) == expected(*MIX)


def test_a_step_is_handed_out_before_the_one_before_it_is_waited_for():
    engine, executor = make_engine(overlap=True)
    engine.add(request("a", prompt_len=5, max_tokens=4, ignore_eos=True))
    run(engine)
    numbers = [step for kind, step in executor.log if kind == "submit"]
    for step in numbers[:-1]:
        assert executor.log.index(("submit", step + 1)) < executor.log.index(("result", step))
    for step in numbers[:-2]:
        assert executor.log.index(("result", step)) < executor.log.index(("submit", step + 2))


def test_without_overlap_each_step_is_waited_for_first():
    engine, executor = make_engine(overlap=False)
    engine.add(request("a", prompt_len=5, max_tokens=4, ignore_eos=True))
    run(engine)
    assert executor.log == [(kind, step) for step in range(4) for kind in ("submit", "result")]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_an_abort_ends_its_request_alone_at_any_moment(overlap, after):
    engine, _ = make_engine(overlap=overlap)
    for submit in MIX:
        engine.add(submit)
    outputs = {}
    for _ in range(after):
        for event in engine.step():
            tokens, _ = outputs.setdefault(event.request_id, ([], None))
            outputs[event.request_id] = (tokens + event.token_ids, event.finish)
    event = engine.abort("r5", FinishReason.STOP)
    assert (event.request_id, event.token_ids, event.finish) == ("r5", [], FinishReason.STOP)
    assert event.first == len(outputs.get("r5", ([], None))[0])
    assert engine.abort("r5") is None
    others = [submit for submit in MIX if submit.request_id != "r5"]
    outputs.pop("r5", None)
    assert run(engine, outputs) == expected(*others)


def test_a_request_goes_on_after_what_was_emitted():
    submit = request("a", max_tokens=9, ignore_eos=True)
    tokens, _ = fault_free(submit, MAX_LEN)
    engine, _ = make_engine()
    engine.add(request("a", emitted=tokens[:4], max_tokens=9, ignore_eos=True))
    events = []
    while engine.has_work:
        events += engine.step()
    assert [event.first for event in events] == [4, 5, 6, 7, 8]
    assert [token for event in events for token in event.token_ids] == tokens[4:]


def test_a_bad_request_is_refused_and_the_others_go_on():
    engine, _ = make_engine()
    engine.add(MIX[0])
    engine.step()
    with pytest.raises(UserError, match="the context holds 64"):
        engine.add(request("long", prompt_len=MAX_LEN))
    with pytest.raises(ProtocolError, match="r0 is submitted twice"):
        engine.add(MIX[0])
    engine.add(MIX[1])
    assert run(engine) == expected(MIX[0], MIX[1])


def test_what_a_step_raises_comes_out_of_the_loop():
    engine, executor = make_engine(failing_step=2)
    engine.add(request("a"))
    with pytest.raises(ArithmeticError, match="rank 0"):
        for _ in range(10):
            engine.step()
    engine.close()
    assert executor.is_closed and executor.log[-1] != ("result", 2)


def test_times_split_scheduling_from_waiting():
    """The clock gives 0, 1, 2, ...: each reading is one second after the last."""
    engine, _ = make_engine(overlap=False)
    engine.add(request("a", prompt_len=5, max_tokens=3, ignore_eos=True))  # reads the clock once
    for _ in range(3):
        engine.step()
    assert (engine.times.schedule_s, engine.times.wait_s) == (6.0, 3.0)
    stats = engine.stats()
    assert (stats.steps, stats.step_seconds, stats.generated_tokens) == (3, 9.0, 3)


def test_an_idle_engine_does_nothing():
    engine, executor = make_engine()
    assert not engine.has_work
    assert engine.step() == []
    assert executor.log == []


def test_prefix_cache_events_and_hits_come_through():
    engine, _ = make_engine()
    engine.add(request("a", prompt_len=13))
    run(engine)
    stored = engine.take_kv_events()
    assert len(stored) >= 3 and all(isinstance(event, BlockStored) for event in stored)
    assert engine.take_kv_events() == []
    engine.add(request("a", prompt_len=13))
    cached = [event.num_cached_tokens for _ in range(20) for event in engine.step() if event.num_cached_tokens >= 0]
    assert cached == [12]


class Watcher:
    """Notes when steps are waited for, in the executor's log."""

    def __init__(self, log):
        self.log = log
        self.tokens = []

    def step_began(self, num_tokens):
        self.tokens.append(num_tokens)
        self.log.append(("began", num_tokens))

    def step_ended(self, num_tokens):
        self.log.append(("ended", num_tokens))


@pytest.mark.parametrize("overlap", [True, False])
def test_an_observer_is_told_of_each_step_around_its_wait(overlap):
    engine, executor = make_engine(overlap=overlap)
    watcher = Watcher(executor.log)
    engine.watch(watcher)
    engine.add(request("a", prompt_len=19, max_tokens=3))
    while engine.has_work:
        engine.step()
    assert watcher.tokens[:3] == [12, 7, 1], "two chunks of the prompt, then a token a step"
    waits = [entry for entry in executor.log if entry[0] != "submit"]
    assert [kind for kind, _ in waits] == ["began", "result", "ended"] * (len(waits) // 3)
