"""A real cluster of one for tests: the head in the test's own loop, its agent and workers as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil

from cluster.config import ClusterConfig, DeploymentConfig, NetworkConfig, RestartPolicy, Timeouts
from cluster.gateway import GenerateRequest
from cluster.head import Head
from cluster.store.settings import StoreConfig
from launcher.agent import local_agent_command
from sonar.config import EngineConfig
from sonar.messages import TokenEvent
from sonar.sampling_params import SamplingParams
from tests.fakes import FAKE_ENGINE_FLAG
from tests.integration.head_main import plain_app

DEADLINE_S = 30.0


@contextlib.asynccontextmanager
async def running_head(
    state_dir: Path,
    model: str = "fake",
    replicas: int = 1,
    timeouts: Timeouts | None = None,
    restart: RestartPolicy | None = None,
    store: StoreConfig | None = None,
) -> AsyncIterator[Head]:
    """A head; at the end it is stopped, and nothing of it may be left."""
    deployment = DeploymentConfig("fake", EngineConfig(model), replicas=replicas, engine="fake")
    config = ClusterConfig(
        state_dir,
        (deployment,),
        NetworkConfig(http_port=0, control_port=0),
        timeouts or Timeouts(drain_s=5.0),
        restart or RestartPolicy(),
        store=store or StoreConfig(),
    )
    head = Head(config, plain_app, agent_command=local_agent_command([FAKE_ENGINE_FLAG]))
    task = asyncio.create_task(head.run())
    await until(lambda: head.control.state.replicas, "the head has started")
    try:
        yield head
    finally:
        agent = head.agent.pid
        children = [psutil.Process(agent), *family(agent)] if psutil.pid_exists(agent) else []
        head.request_stop()
        await asyncio.wait_for(task, DEADLINE_S)
        await until(lambda: not alive(children), "children of the head have ended")


async def until(condition: Callable[[], object], what: str, timeout_s: float = DEADLINE_S) -> float:
    """Waits for a condition; returns how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def ready(head: Head, count: int = 1) -> None:
    await until(lambda: len(head.control.table.routes()) == count, f"{count} replicas are ready")


def worker_pid(head: Head, replica_id: str = "fake-0") -> int:
    return head.control.state.replicas[replica_id].ranks[0].pid


def family(pid: int) -> list[psutil.Process]:
    """All that descends from a process (multiprocessing's helper too)."""
    return psutil.Process(pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


class Client:
    """Reads one stream and checks that its events follow one another."""

    def __init__(self, head: Head, request_id: str, prompt: list[int], max_tokens: int, seed: int = 3) -> None:
        self.tokens: list[int] = []
        self.last: TokenEvent | None = None
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
        self._request = GenerateRequest(request_id, "fake", prompt, sampling)
        self._task = asyncio.create_task(self._read(head))

    async def _read(self, head: Head) -> None:
        async for event in head.services.gateway.generate(self._request):
            assert self.last is None or self.last.finish is None
            assert event.first == len(self.tokens)
            self.tokens += event.token_ids
            self.last = event

    async def has(self, count: int) -> None:
        await until(lambda: len(self.tokens) >= count, f"{self._request.request_id} has {count} tokens")

    async def end(self) -> TokenEvent:
        await asyncio.wait_for(self._task, DEADLINE_S)
        assert self.last is not None
        return self.last

    async def close(self) -> None:
        """The client goes away."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
