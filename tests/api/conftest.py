"""A real uvicorn on loopback around the application, its gateway a fake one that tests reach into."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest
import uvicorn
from openai import OpenAI
from prometheus_client import CollectorRegistry

from cluster.answer_journal import AnswerJournal
from cluster.api.app import create_app
from cluster.api.settings import ApiSettings
from tests.api.fakes import FakeGateway, byte_tokenizer


@dataclass
class Served:
    """A running server and its inside. `gateway` fields may be set before a request."""

    gateway: FakeGateway
    port: int
    registry: CollectorRegistry

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def wait_idle(self) -> None:
        """Until the gateway has no open request; a test that waits in vain fails."""
        deadline = time.monotonic() + 5
        while self.gateway.open_ids:
            assert time.monotonic() < deadline, f"still open: {self.gateway.open_ids}"
            time.sleep(0.002)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 when there is none yet."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)


@contextmanager
def serve(gateway: FakeGateway, settings: ApiSettings, journal: AnswerJournal | None = None) -> Iterator[Served]:
    """Run the API in a thread until the block ends."""
    registry = CollectorRegistry()
    app = create_app(
        gateway, settings, registry=registry, load_tokenizer=lambda path: byte_tokenizer(), journal=journal
    )
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    started = threading.Event()
    found: list[Served] = []

    async def main() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        found.append(Served(gateway, port, registry))
        started.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(10), "the server did not start"
    try:
        yield found[0]
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def served() -> Iterator[Served]:
    """A server without keys."""
    with serve(FakeGateway(), ApiSettings(ready_interval_s=0.2, ready_timeout_s=0.5)) as running:
        yield running
