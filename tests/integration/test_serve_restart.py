"""`sonar serve` with a real engine: the server is killed in the middle of streams, started again, and misses nothing.

Logprobs, usage, several choices, penalties and seeded draws are those of the unbroken run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.demo_server import SONAR, free_port
from tests.integration.test_head_restart import DEADLINE_S, Reader
from tests.tiny import write_tiny_folder

FLAGS = ["--threads", "1", "--kv-cache-memory", "8MiB", "--device", "cpu", "--served-model-name", "tiny"]
STREAM = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}


class Server:
    """`sonar serve` in the foreground."""

    def __init__(self, model: Path, state_home: Path, port: int, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [*SONAR, "serve", str(model), "--port", str(port), *FLAGS, *flags]
        environ = {**os.environ, "XDG_STATE_HOME": str(state_home)}
        self._log = state_home.with_suffix(".log").open("ab")
        self.process = subprocess.Popen(command, env=environ, stdout=self._log, stderr=self._log)

    def wait(self, path: str) -> None:
        """Until a route answers 200."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + path, timeout=10).status_code == 200:
                    return
            assert self.process.poll() is None, "it ended"
            assert time.monotonic() < deadline, f"{path} is not 200 within {DEADLINE_S} s"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL; what it started ends with it."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(DEADLINE_S) == 0


def readers() -> list[Reader]:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "logprobs": True, "top_logprobs": 2}
    text = {"prompt": "abc", "max_tokens": 400, "n": 2, "logprobs": 1, "frequency_penalty": 0.5, "temperature": 0.9}
    return [
        Reader("/v1/chat/completions", {**STREAM, **chat, "seed": 4, "chat_template_kwargs": {}}),
        Reader("/v1/completions", {**STREAM, **text, "seed": 9}),
    ]


def logprobs_of(reader: Reader) -> dict[int, list[Any]]:
    """Each choice's rows in order; the two endpoints have forms of their own."""
    rows: dict[int, list[Any]] = {}
    for event in map(json.loads, reader.events[:-1]):
        for choice in event["choices"]:
            told = choice["logprobs"]
            if told is None:
                continue
            columns = [told[name] for name in sorted(told) if told[name]]
            rows.setdefault(choice["index"], []).extend(zip(*columns, strict=True))
    return rows


def test_a_killed_server_goes_on_with_its_streams(tmp_path: Path) -> None:
    model = write_tiny_folder("llama", tmp_path / "model")
    port = free_port()
    server = Server(model, tmp_path / "state", port)
    server.wait("/ready")
    whole, broken = readers(), readers()
    for reader in whole:
        assert reader.read(server.url)
    for reader in broken:
        assert reader.read(server.url, until=8)
    server.kill()
    server = Server(model, tmp_path / "state", port)
    server.wait("/health")
    for reader, unbroken in zip(broken, whole, strict=True):
        assert reader.read(server.url)
        assert reader.said() == unbroken.said()
        assert logprobs_of(reader) == logprobs_of(unbroken)
        for name in ("prompt_tokens", "completion_tokens"):
            assert reader.usage()[name] == unbroken.usage()[name]
    # This engine is quick: the first stream may have ended before the kill, and is then read from the file alone.
    assert re.search(r"sonar_answers_readmitted_total [12]\.0", httpx.get(server.url + "/metrics").text)
    server.stop()


def test_a_model_that_was_kept_goes_on_with_its_streams_and_is_not_loaded_again(tmp_path: Path) -> None:
    model, port, keep = write_tiny_folder("llama", tmp_path / "model"), free_port(), ("--keep-workers", "30")
    server = Server(model, tmp_path / "state", port, *keep)
    server.wait("/ready")
    host = psutil.Process(server.process.pid).children(recursive=True)
    whole, broken = readers(), readers()
    for reader in whole:
        assert reader.read(server.url)
    for reader in broken:
        assert reader.read(server.url, until=8)
    server.process.kill()
    server.process.wait()
    server = Server(model, tmp_path / "state", port, *keep)
    server.wait("/ready")
    assert all(process.is_running() for process in host)
    for reader, unbroken in zip(broken, whole, strict=True):
        assert reader.read(server.url)
        assert reader.said() == unbroken.said()
        assert logprobs_of(reader) == logprobs_of(unbroken)
    metrics = httpx.get(server.url + "/metrics").text
    assert "sonar_tokens_replayed_total 0.0" in metrics and "sonar_migrations_total 0.0" in metrics
    server.stop()
    _, left = psutil.wait_procs(host, timeout=10)
    assert not left
