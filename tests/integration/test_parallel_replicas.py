"""Replicas of several ranks under a real head and agent: streams outlive any rank, and a fault is told by its rank."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, DeploymentConfig, NetworkConfig, Timeouts
from cluster.gateway import GenerateRequest
from cluster.head import Head
from launcher.agent import local_agent_command
from sonar.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from sonar.sampling_params import SamplingParams
from tests.integration.cluster_of_one import alive, family, kill, until
from tests.integration.faulty_engine import FAULTY_ENGINE_FLAG
from tests.integration.head_main import plain_app
from tests.tiny import write_tiny_folder

START_S = 90.0
MAX_TOKENS = 90
GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "golden_smollm2.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_folder("llama", tmp_path_factory.mktemp("llama")))


@contextlib.asynccontextmanager
async def serving(state_dir: Path, model: str, parallel: ParallelConfig, **timeouts: float) -> AsyncIterator[Head]:
    """A head whose one replica is ready; at the end nothing of it may be left."""
    engine = EngineConfig(
        model=model,
        device="cpu",
        threads=1,
        activations="float32",
        cache=CacheConfig(memory_bytes=32 << 20),
        scheduler=SchedulerConfig(max_num_requests=8, max_step_tokens=500),
        parallel=parallel,
    )
    config = ClusterConfig(
        state_dir,
        (DeploymentConfig("m", engine, engine="faulty"),),
        NetworkConfig(http_port=0, control_port=0),
        Timeouts(drain_s=10.0, **timeouts),
    )
    others = family(os.getpid())  # servers of other tests, and multiprocessing's helper
    head = Head(config, plain_app, agent_command=local_agent_command([FAULTY_ENGINE_FLAG]))
    task = asyncio.create_task(head.run())
    try:
        await is_ready(head, 1)
        yield head
    finally:
        children = [child for child in family(os.getpid()) if child not in others]
        head.request_stop()
        await asyncio.wait_for(task, START_S)
        await until(lambda: not alive(children), "children of the head have ended")


async def is_ready(head: Head, incarnation: int) -> None:
    def check() -> bool:
        replica = head.control.state.replicas.get("m-0")
        return replica is not None and replica.incarnation == incarnation and bool(head.control.table.routes())

    await until(check, f"incarnation {incarnation} is ready", START_S)


async def generate(head: Head, name: str, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    tokens: list[int] = []
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=1)
    async for event in head.services.gateway.generate(GenerateRequest(name, "m", prompt, sampling)):
        assert event.first == len(tokens) and not event.error, event
        tokens += event.token_ids
    return tokens


def rank_pid(head: Head, rank: int) -> int:
    return head.control.state.replicas["m-0"].ranks[rank].pid


@pytest.mark.parametrize(("tp_size", "pp_size", "victim"), [(2, 1, 1), (1, 2, 1), (2, 1, 0)])
async def test_a_stream_outlives_any_rank(tmp_path, folder, tp_size, pp_size, victim) -> None:
    async with serving(tmp_path, folder, ParallelConfig(tp_size, pp_size)) as head:
        whole = await generate(head, "whole", [5, 6, 7])
        task = asyncio.create_task(generate(head, "broken", [5, 6, 7]))
        steps = head.control.table
        await until(lambda: any(route.attempts for route in steps.routes()), "it is being computed")
        kill(rank_pid(head, victim), signal.SIGKILL)
        assert await asyncio.wait_for(task, START_S) == whole
        replica = head.control.state.replicas["m-0"]
        assert replica.incarnation == 2
        assert f"rank {victim} " in replica.failure.reason, replica.failure.reason
        assert len(whole) == MAX_TOKENS


@pytest.mark.parametrize(("tp_size", "pp_size", "rank"), [(2, 1, 1), (1, 2, 1), (2, 1, 0)])
async def test_an_exception_of_any_rank_reaches_the_head_while_the_others_wait(
    tmp_path, folder, tp_size, pp_size, rank
) -> None:
    model = f"{folder}?rank={rank}&step=20&how=raise"
    async with serving(tmp_path, model, ParallelConfig(tp_size, pp_size)) as head:
        replica = head.control.state.replicas["m-0"]
        task = asyncio.create_task(generate(head, "r", [5, 6, 7]))
        await until(lambda: replica.failure.reason, "the head has heard of it")
        assert replica.failure.reason.startswith(f"rank {rank} faulted after step "), replica.failure.reason
        assert "ArithmeticError: planted in step 20" in replica.failure.reason
        began = time.monotonic()
        await until(lambda: replica.incarnation == 2, "every rank of the old incarnation has ended")
        print(f"the others ended within {time.monotonic() - began:.2f} s")
        assert len(await asyncio.wait_for(task, START_S)) == MAX_TOKENS
        log = (tmp_path / f"agent/logs/m-0.{rank}.log").read_text()
        assert "planted in step 20" in log and "Traceback" in log


async def test_a_rank_that_hangs_ends_the_incarnation(tmp_path, folder) -> None:
    model = f"{folder}?rank=1&step=20&how=hang"
    async with serving(tmp_path, model, ParallelConfig(tp_size=2), hang_s=3.0) as head:
        tokens = await asyncio.wait_for(generate(head, "r", [5, 6, 7]), START_S)
        replica = head.control.state.replicas["m-0"]
        assert len(tokens) == MAX_TOKENS and replica.incarnation == 2
        assert "no sign of life" in replica.failure.reason


@pytest.mark.slow
@pytest.mark.parametrize(("tp_size", "pp_size"), [(3, 1), (1, 3), (2, 2)])
async def test_the_demo_model_gives_the_golden_tokens(tmp_path, smollm2, tp_size, pp_size) -> None:
    async with serving(tmp_path, str(smollm2.path), ParallelConfig(tp_size, pp_size)) as head:
        cases = {**GOLDEN["completion"], **GOLDEN["chat"]}
        names = list(cases)
        outputs = await asyncio.gather(
            *(
                generate(head, name, cases[name]["prompt_token_ids"], len(cases[name]["output_token_ids"]))
                for name in names
            )
        )
        for name, tokens in zip(names, outputs):
            case = cases[name]
            close_calls = [i for i, margin in enumerate(case["top2_logit_margin"]) if margin < 0.05]
            end = close_calls[0] if close_calls else len(case["output_token_ids"])
            assert tokens[:end] == case["output_token_ids"][:end], name
