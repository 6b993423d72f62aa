"""Pools of prefill and decode replicas under a real head and agent: every stream is that of one engine alone, whoever
computes its prompt, and whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, DeploymentConfig, NetworkConfig, Timeouts
from cluster.events import DeploymentApplied
from cluster.gateway import GenerateRequest
from cluster.head import Head
from launcher.agent import local_agent_command
from sonar.config import CacheConfig, EngineConfig, SchedulerConfig
from sonar.engine import BuiltEngine, build_engine
from sonar.messages import FinishReason, LeadStats, Submit, TokenEvent
from sonar.sampling_params import SamplingParams
from tests.integration.cluster_of_one import alive, family, kill, until
from tests.integration.head_main import plain_app
from tests.tiny import write_tiny_folder

START_S = 90.0
LEAST_TOKENS = 32


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_tiny_folder("gemma3", tmp_path_factory.mktemp("gemma3"))
    return EngineConfig(
        model=str(folder),
        device="cpu",
        threads=1,
        kv_transfer="shm",
        kv_checksums=True,
        cache=CacheConfig(memory_bytes=16 << 20),
        scheduler=SchedulerConfig(max_num_requests=8, max_step_tokens=24),
    )


@pytest.fixture(scope="module")
def alone(engine_config: EngineConfig) -> BuiltEngine:
    return build_engine(engine_config)


@contextlib.asynccontextmanager
async def pools(state_dir: Path, engine: EngineConfig, prefill: int, decode: int) -> AsyncIterator[Head]:
    """A head whose replicas are ready; at the end nothing of it may be left."""
    deployment = DeploymentConfig(
        "m", engine, replicas=prefill + decode, prefill_replicas=prefill, remote_prefill_tokens=LEAST_TOKENS
    )
    config = ClusterConfig(state_dir, (deployment,), NetworkConfig(http_port=0, control_port=0), Timeouts(drain_s=10.0))
    others = family(os.getpid())
    head = Head(config, plain_app, agent_command=local_agent_command())
    task = asyncio.create_task(head.run())
    try:
        await until(lambda: len(head.control.table.routes()) == prefill + decode, "all are ready", START_S)
        yield head
    finally:
        children = [child for child in family(os.getpid()) if child not in others]
        head.request_stop()
        await asyncio.wait_for(task, START_S)
        await until(lambda: not alive(children), "children of the head have ended")


async def stream(head: Head, request: GenerateRequest) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    async for event in head.services.gateway.generate(request):
        assert event.first == sum(len(e.token_ids) for e in events) and not event.error, event
        events.append(event)
    return events


def expected(alone: BuiltEngine, request: GenerateRequest) -> list[TokenEvent]:
    """The same request, computed by one engine."""
    submit = Submit(
        incarnation=0,
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        cache_salt=request.request_id,
    )
    alone.engine.add(submit)
    events: list[TokenEvent] = []
    while alone.engine.num_open:
        events += alone.engine.step()
    return events


def what_clients_see(events: list[TokenEvent]) -> tuple:
    """Whatever the number of events it came in."""
    tokens = [token for event in events for token in event.token_ids]
    logprobs = [row for event in events for row in event.logprobs]
    prompt_logprobs = [row for event in events for row in event.prompt_logprobs]
    return tokens, logprobs, prompt_logprobs, events[-1].finish, events[-1].stop_token_id


def make_requests(rng: random.Random, name: str, count: int) -> list[GenerateRequest]:
    """Prompts that share beginnings, of all lengths; settings of all kinds."""
    texts = [[rng.randrange(4, 500) for _ in range(300)] for _ in range(3)]
    requests = []
    for number in range(count):
        prompt = [*rng.choice(texts)[: rng.randrange(8, 260)], rng.randrange(4, 500)]
        sampling = SamplingParams(
            seed=number,
            temperature=rng.choice((0.0, 1.0)),
            max_tokens=rng.choice((1, 8, 40)),
            ignore_eos=rng.random() < 0.7,
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=1 if rng.random() < 0.1 else None,
            stop_token_ids=tuple(range(30, 60)) if rng.random() < 0.2 else (),
            repetition_penalty=rng.choice((1.0, 1.3)),
        )
        requests.append(GenerateRequest(f"{name}{number}", "m", prompt, sampling))
    return requests


def stats_of(head: Head) -> list[LeadStats]:
    return [route.stats for route in head.control.table.routes() if route.stats is not None]


def is_quiet(head: Head) -> bool:
    """No block is used by anyone, as all replicas say."""
    stats = stats_of(head)
    return len(stats) == len(head.control.table.routes()) and all(
        s.blocks_in_use == s.blocks_in_transit == s.blocks_quarantined == 0
        and s.blocks_free + s.blocks_cached == s.blocks_total
        and not any(pair.open_fetches for pair in s.pairs)
        for s in stats
    )


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2)], ids=["1p1d", "2p1d", "1p2d"])
async def test_streams_are_those_of_one_engine_whoever_dies(
    tmp_path: Path, engine_config: EngineConfig, alone: BuiltEngine, prefill: int, decode: int
) -> None:
    rng = random.Random(10 * prefill + decode)
    async with pools(tmp_path, engine_config, prefill, decode) as head:
        requests = make_requests(rng, "r", 16)
        outputs = await asyncio.gather(*(stream(head, request) for request in requests))
        for request, events in zip(requests, outputs):
            assert what_clients_see(events) == what_clients_see(expected(alone, request)), request.request_id
        fetched = [event.kv_fetch for events in outputs for event in events if event.kv_fetch is not None]
        state = [(r.replica_id, r.incarnation, r.stats) for r in head.control.table.routes()]
        assert len(fetched) > 3 and not any(record.error for record in fetched), (fetched, state)
        await until(lambda: is_quiet(head), "all blocks are back")
        decoding = {f"m-{index}" for index in range(prefill, prefill + decode)}
        assert all(route.stats.pairs == () for route in head.control.table.routes() if route.replica_id not in decoding)

        await _cancel_some(head, make_requests(rng, "c", 24), rng)
        await until(lambda: is_quiet(head), "all blocks are back after cancels")

        requests = make_requests(rng, "k", 16)
        tasks = [asyncio.create_task(stream(head, request)) for request in requests]
        relayed = head.control.peers.num_carried
        await until(lambda: head.control.peers.num_carried > relayed + 4, "transfers are under way")
        kill(head.control.state.replicas["m-0"].ranks[0].pid, signal.SIGKILL)
        for request, task in zip(requests, tasks):
            events = await asyncio.wait_for(task, START_S)
            assert what_clients_see(events) == what_clients_see(expected(alone, request)), request.request_id
        await until(lambda: len(head.control.table.routes()) == prefill + decode, "it is back", START_S)
        await until(lambda: is_quiet(head), "all blocks are back after a death")

        deployment = dataclasses.replace(head.control.state.deployments["m"], prefill_replicas=0)
        head.control.feed(DeploymentApplied(deployment))
        for request in make_requests(rng, "x", 4):  # every replica does both now
            events = await stream(head, request)
            assert what_clients_see(events) == what_clients_see(expected(alone, request)), request.request_id


async def _cancel_some(head: Head, requests: list[GenerateRequest], rng: random.Random) -> None:
    """Clients of which half go away, at any time."""

    async def client(request: GenerateRequest, patience_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await stream(head, request)

    await asyncio.gather(*(client(r, rng.choice((30.0, rng.random() * 0.4))) for r in requests))


@pytest.mark.slow
async def test_blocks_are_back_after_a_thousand_requests(
    tmp_path: Path, engine_config: EngineConfig, alone: BuiltEngine
) -> None:
    rng = random.Random(7)
    async with pools(tmp_path, engine_config, 1, 1) as head:
        for turn in range(40):
            requests = make_requests(rng, f"t{turn}-", 25)
            if turn % 10 == 5:
                kill(head.control.state.replicas[f"m-{turn // 10 % 2}"].ranks[0].pid, signal.SIGKILL)
            await _cancel_some(head, requests, rng)
        await until(lambda: len(head.control.table.routes()) == 2, "both are back", START_S)
        await until(lambda: is_quiet(head), "all blocks are back")
        last = make_requests(rng, "last", 4)
        for request in last:
            assert what_clients_see(await stream(head, request)) == what_clients_see(expected(alone, request))
        assert head.control.table.counters.finished[FinishReason.ERROR] == 0
