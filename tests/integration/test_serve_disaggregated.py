"""`sonar serve --disaggregated` as a user starts it: the demo model answers as an ordinary server does, and the prompt
was computed in the other replica."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import pytest

from tests.demo_server import DemoServer, running_demo

# Long enough to be worth another replica.
PROMPT = "The history of the lighthouse begins long before electric light. " * 14
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 12, "temperature": 0.0, "logprobs": 2},
    {"max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 3},
    {"max_tokens": 40, "temperature": 0.0, "stop": [" the"]},
    {"max_tokens": 24, "temperature": 1.0, "seed": 6, "stream": True},
]


def _answer(server: DemoServer, number: int) -> object:
    """What a client sees, but for ids and times; of a stream its text and end."""
    body = {"model": "smollm2-135m", "prompt": f"{number}. {PROMPT}", **ASKED[number]}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.json()["choices"], reply.json()["usage"]
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def _metrics(server: DemoServer) -> dict[str, float]:
    """Of the one pair: what replica 1 got from replica 0."""
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    labels = r'peer="smollm2-135m-0",replica="smollm2-135m-1"'
    found = re.findall(rf"^sonar_kv_pair_(\w+?)_total{{{labels}}} (\S+)$", text, re.MULTILINE)
    return {"fetches": 0.0} | {name: float(value) for name, value in found}


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory):
    with running_demo(tmp_path_factory.mktemp("pools"), "--disaggregated") as server:
        yield server


def test_answers_are_those_of_an_ordinary_server(pools: DemoServer, demo_server: DemoServer) -> None:
    for number in range(len(ASKED)):
        assert _answer(pools, number) == _answer(demo_server, number), ASKED[number]
    deadline_s = time.monotonic() + 10  # a replica tells its figures once a second
    while _metrics(pools)["fetches"] < len(ASKED):
        assert time.monotonic() < deadline_s, _metrics(pools)
        time.sleep(0.1)
    figures = _metrics(pools)
    assert figures["failed"] == figures["recomputed_tokens"] == 0 and figures["bytes_read"] > 0, figures
