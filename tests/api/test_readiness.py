"""Ready means: a token of every model within the interval, by traffic or by a probe that somebody asked for."""

from __future__ import annotations

import asyncio

import pytest

from cluster.api.readiness import FAILURE_MEMORY_S, Readiness
from cluster.api.settings import ApiSettings
from cluster.api.tokenizers import TokenizerPool
from tests.api.fakes import FakeGateway, byte_tokenizer

SETTINGS = ApiSettings(ready_interval_s=10.0, ready_timeout_s=0.01)


class Clock:
    """Seconds that pass when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def readiness_of(gateway: FakeGateway, clock: Clock) -> Readiness:
    return Readiness(gateway, TokenizerPool(lambda path: byte_tokenizer(), SETTINGS), SETTINGS, clock)


async def test_a_probe_counts_for_the_interval() -> None:
    gateway, clock = FakeGateway(names=("a", "b")), Clock()
    readiness = readiness_of(gateway, clock)
    for now, probes in ((100.0, 2), (109.9, 2), (110.0, 4)):
        clock.now = now
        assert await readiness.reasons() == {}
        assert gateway.num_probes == probes


async def test_traffic_makes_probes_needless_even_for_a_probe_that_would_fail() -> None:
    gateway, clock = FakeGateway(names=("a",), probe_result=False), Clock()
    readiness = readiness_of(gateway, clock)
    readiness.saw_token("a")
    assert await readiness.reasons() == {}
    assert gateway.num_probes == 0
    clock.now += 10
    assert await readiness.reasons() == {"a": "no token came within 0.01 s"}


@pytest.mark.parametrize(
    "result,reason",
    [(False, "no token came"), (RuntimeError("secret"), "the server's log"), (TimeoutError(), "did not return")],
)
async def test_failures_are_reasons_and_remembered_briefly(result: bool | Exception, reason: str) -> None:
    gateway, clock = FakeGateway(names=("a",), probe_result=result), Clock()
    readiness = readiness_of(gateway, clock)
    assert reason in (await readiness.reasons())["a"]
    clock.now += FAILURE_MEMORY_S / 2
    assert reason in (await readiness.reasons())["a"]
    assert gateway.num_probes == 1
    clock.now += FAILURE_MEMORY_S
    gateway.probe_result = True
    assert await readiness.reasons() == {}


async def test_no_model_or_no_replica_is_not_ready_without_a_probe() -> None:
    gateway = FakeGateway(names=())
    readiness = readiness_of(gateway, Clock())
    assert await readiness.reasons() == {"": "no model is deployed"}
    gateway.names, gateway.ready = ("a",), False
    readiness.saw_token("a")
    assert await readiness.reasons() == {"a": "no replica takes requests"}
    gateway.note = "no CUDA device on any host"
    assert await readiness.reasons() == {"a": "no replica takes requests: no CUDA device on any host"}
    assert gateway.num_probes == 0


async def test_many_askers_share_a_probe_and_one_that_leaves_spoils_nothing() -> None:
    gateway = FakeGateway(names=("a",), delay_s=0.02)
    readiness = readiness_of(gateway, Clock())
    asking = [asyncio.create_task(readiness.reasons()) for _ in range(10)]
    await asyncio.sleep(0.005)
    asking[0].cancel()
    assert await asyncio.gather(*asking[1:]) == [{}] * 9
    assert gateway.num_probes == 1


async def test_a_tokenizer_that_cannot_be_loaded_is_not_ready() -> None:
    def load(path: str):
        raise OSError("no such file")

    readiness = Readiness(FakeGateway(names=("a",)), TokenizerPool(load, SETTINGS), SETTINGS, Clock())
    assert "log" in (await readiness.reasons())["a"]
