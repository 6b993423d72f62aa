"""The head is killed in the middle of streams and started again: who comes back by id misses nothing."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.demo_server import free_port

MODEL = "fake step_ms=10 load_steps=1 vocab=256"
RESUMABLE = {"Sonar-Resumable": "true"}
DEADLINE_S = 40.0


class ApiHead:
    """A head of its own process, with the real API."""

    def __init__(self, state_dir: Path, port: int, model: str = MODEL, *more: str) -> None:
        command = [sys.executable, "-m", "tests.integration.api_main", str(state_dir), str(port), model, *more]
        self.began_s = time.monotonic()
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def wait(self, path: str) -> float:
        """Until a route answers 200; seconds since the start."""
        while time.monotonic() - self.began_s < DEADLINE_S:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + path, timeout=5).status_code == 200:
                    return time.monotonic() - self.began_s
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.02)
        raise AssertionError(f"{path} is not 200 after {DEADLINE_S} s")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        self.process.terminate()
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, errors


@dataclass
class Reader:
    """Reads one stream over as many connections as it takes, as an SSE client does: by the last id it saw."""

    path: str
    body: dict[str, Any]
    events: list[str] = field(default_factory=list)
    last_id: str = ""

    def read(self, url: str, until: int = 10**9) -> bool:
        """Reads on until it has so many events, or all; False when the connection broke."""
        headers = {**RESUMABLE, **({"Last-Event-ID": self.last_id} if self.last_id else {})}
        rest = ""
        try:
            with httpx.stream("POST", url + self.path, json=self.body, headers=headers, timeout=DEADLINE_S) as response:
                assert response.status_code == 200, response.read()
                for chunk in response.iter_text():
                    *blocks, rest = (rest + chunk).split("\n\n")
                    for block in blocks:
                        self._take(block)
                    if len(self.events) >= until:
                        return True
        except httpx.TransportError:
            return False
        return self.events[-1] == "[DONE]"

    def _take(self, block: str) -> None:
        found = re.fullmatch(r"id: (.+:(\d+))\ndata: (.*)", block)
        assert found, block
        assert int(found[2]) == len(self.events) + 1, "no gap and no repeat"
        self.last_id = found[1]
        self.events.append(found[3])

    def said(self) -> dict[int, tuple[str, Any]]:
        """Each choice's text and end. How many tokens share an event depends on the load, and is not compared."""
        texts: dict[int, str] = {}
        ends: dict[int, Any] = {}
        for event in map(json.loads, self.events[:-1]):
            for choice in event["choices"]:
                index = choice["index"]
                delta = choice.get("text") or choice.get("delta", {}).get("content", "")
                texts[index] = texts.get(index, "") + delta
                ends[index] = choice["finish_reason"]
        return {index: (text, ends[index]) for index, text in texts.items()}

    def usage(self) -> Any:
        """As the last event but the end mark tells it."""
        return json.loads(self.events[-2])["usage"]


def readers() -> list[Reader]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "seed": 5, **usage}
    texts = {"model": "fake", "prompt": ["one", "two"], "seed": 6, **usage}
    return [
        Reader("/v1/chat/completions", {**chat, "max_tokens": 150}),
        Reader("/v1/chat/completions", {**chat, "max_tokens": 120, "n": 2}),
        Reader("/v1/completions", {**texts, "max_tokens": 100}),
    ]


@pytest.mark.parametrize("num_kills", [1, 2])
def test_streams_go_on_after_sigkill_of_the_head(tmp_path: Path, num_kills: int) -> None:
    port = free_port()
    head = ApiHead(tmp_path, port)
    head.wait("/ready")
    whole, broken = readers(), readers()
    for reader in whole:
        assert reader.read(head.url)
    for kill in range(1, num_kills + 1):
        for reader in broken:
            assert reader.read(head.url, until=25 * kill)
        head.kill()
        head = ApiHead(tmp_path, port)
        print(f"the head answers after {head.wait('/health'):.2f} s", end=", ")
    began_s = head.began_s
    for reader in broken:
        assert reader.read(head.url, until=len(reader.events) + 1)
    print(f"the first new tokens are there after {time.monotonic() - began_s:.2f} s")
    for reader, unbroken in zip(broken, whole, strict=True):
        assert reader.read(head.url)
        assert reader.said() == unbroken.said()
        assert reader.usage() == unbroken.usage()
    metrics = httpx.get(head.url + "/metrics").text
    assert "sonar_answers_readmitted_total 3.0" in metrics
    head.stop()


def test_a_keyed_answer_is_computed_once_over_two_heads(tmp_path: Path) -> None:
    port = free_port()
    body = {"model": "fake", "prompt": "one", "max_tokens": 150, "n": 2}
    keyed = {"Idempotency-Key": "order"}
    head = ApiHead(tmp_path, port)
    head.wait("/ready")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(head.url + "/v1/completions", json=body, headers=keyed, timeout=0.6)
    head.kill()
    head = ApiHead(tmp_path, port)
    head.wait("/health")
    answers = [httpx.post(head.url + "/v1/completions", json=body, headers=keyed, timeout=DEADLINE_S) for _ in range(2)]
    assert answers[0].content == answers[1].content
    assert answers[0].json()["usage"]["completion_tokens"] == 300
    metrics = httpx.get(head.url + "/metrics").text
    generated = re.search(r"^sonar_tokens_total (\S+)", metrics, re.MULTILINE)
    assert generated and float(generated[1]) < 300, "what the first head had emitted was not computed again"
    head.kill()
    head = ApiHead(tmp_path, port)
    head.wait("/health")
    kept = httpx.post(head.url + "/v1/completions", json=body, headers=keyed, timeout=DEADLINE_S)
    assert kept.content == answers[0].content, "an ended answer, from the file alone"
    head.wait("/ready")
    head.stop()
