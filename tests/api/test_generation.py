"""Choices through the gateway: merging, and that no request outlives its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from prometheus_client import CollectorRegistry

from cluster.api import generation
from cluster.api.choice import Choice
from cluster.api.errors import ApiError
from cluster.api.generation import run_choices
from cluster.api.metrics import ApiMetrics
from cluster.gateway import GenerateRequest
from sonar.errors import CapacityError
from sonar.messages import FinishReason, TokenEvent
from sonar.sampling_params import SamplingParams
from sonar.tokenizer import OutputText
from tests.api.fakes import FakeGateway, byte_tokenizer

TOKENIZER = byte_tokenizer()
REGISTRY = CollectorRegistry()
METRICS = ApiMetrics(REGISTRY).of_model("m")


def choices_of(count: int, **sampling: object) -> list[Choice]:
    params = SamplingParams(seed=0, **{"max_tokens": 6, **sampling})  # type: ignore[arg-type]
    return [
        Choice(GenerateRequest(f"r{i}", "m", [1], params), OutputText(TOKENIZER, params), index=i) for i in range(count)
    ]


async def texts_of(gateway: FakeGateway, choices: list[Choice]) -> list[str]:
    texts = [""] * len(choices)
    async with aclosing(run_choices(gateway, choices, METRICS)) as batches:
        async for batch in batches:
            for choice, piece in batch:
                texts[choice.index] += piece.text
    return texts


@pytest.mark.parametrize("count", [1, 2, 50])
async def test_every_choice_gets_its_tokens_in_order(count: int) -> None:
    gateway = FakeGateway(text=b"abcdefgh")
    assert await texts_of(gateway, choices_of(count)) == ["abcdef"] * count
    assert gateway.open_ids == {}
    assert set(gateway.ended.values()) == {"length"}
    assert gateway.aborts == []


@pytest.mark.parametrize("count", [1, 3])
async def test_a_stop_string_ends_the_request_at_the_gateway_as_stop(count: int) -> None:
    gateway = FakeGateway(text=b"abcdefgh", delay_s=0.001)
    assert await texts_of(gateway, choices_of(count, stop=("d",))) == ["abc"] * count
    assert sorted(gateway.aborts) == [(f"r{i}", FinishReason.STOP) for i in range(count)]
    assert set(gateway.ended.values()) == {"stop"}


async def test_a_gateway_that_never_acknowledges_a_stop_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "STOP_DEADLINE_S", 0.02)
    gateway = FakeGateway(text=b"abcdefgh")
    monkeypatch.setattr(gateway, "abort", lambda request_id, finish=FinishReason.ABORT: None)
    assert await texts_of(gateway, choices_of(1, stop=("b",), max_tokens=1_000_000)) == ["a"]
    assert gateway.open_ids == {}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("after", [0, 1, 3])
async def test_closing_early_aborts_every_open_request(count: int, after: int) -> None:
    gateway = FakeGateway(delay_s=0.001)
    batches = run_choices(gateway, choices_of(count, max_tokens=1000), METRICS)
    for _ in range(after):
        await anext(batches)
    await batches.aclose()
    assert gateway.open_ids == {}
    assert all(finish is FinishReason.ABORT for _, finish in gateway.aborts)
    assert {request_id for request_id, _ in gateway.aborts} == {r.request_id for r in gateway.requests}


@pytest.mark.parametrize("count", [1, 3])
async def test_an_error_of_one_choice_ends_all(count: int) -> None:
    gateway = FakeGateway(delay_s=0.001)
    gateway.fail = lambda request, number: "lost" if request.request_id == "r0" and number == 3 else None
    with pytest.raises(ApiError, match="lost"):
        await texts_of(gateway, choices_of(count, max_tokens=1000))
    assert gateway.open_ids == {}


async def test_a_full_queue_ends_all() -> None:
    gateway = FakeGateway(queue_size=2, delay_s=0.001)
    with pytest.raises(CapacityError):
        await texts_of(gateway, choices_of(3, max_tokens=1000))
    assert gateway.open_ids == {}


async def test_an_answer_without_a_final_event_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        yield TokenEvent(request_id=request.request_id, first=0, token_ids=[65])

    gateway = FakeGateway()
    monkeypatch.setattr(gateway, "generate", broken)
    with pytest.raises(ApiError, match="without a final event"):
        await texts_of(gateway, choices_of(1))


async def test_a_reader_that_waits_holds_its_choices_back_and_gets_all_then() -> None:
    gateway = FakeGateway(text=b"ab")
    batches = run_choices(gateway, choices_of(2, max_tokens=10_000), METRICS)
    await anext(batches)
    for _ in range(2000):
        await asyncio.sleep(0)
    pending = await anext(batches)
    assert len(pending) <= 2 * generation.MAX_PENDING_UPDATES + 2, "the buffer is bounded"
    num_tokens = len(pending) + sum([len(batch) async for batch in batches])
    assert num_tokens >= 2 * 10_000 - 2


async def test_sequences_are_measured() -> None:
    before = REGISTRY.get_sample_value("sonar_output_tokens_sum", {"model": "m"}) or 0
    await texts_of(FakeGateway(), choices_of(2))
    assert REGISTRY.get_sample_value("sonar_output_tokens_sum", {"model": "m"}) == before + 12
    assert (REGISTRY.get_sample_value("sonar_itl_seconds_count", {"model": "m"}) or 0) >= 10
