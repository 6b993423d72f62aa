"""Streams on real sockets: what is sent when, clients that leave, clients that do not read, many at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from cluster.api.settings import ApiSettings
from tests.api.conftest import Served, serve
from tests.api.fakes import FakeGateway


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "seed": 0, **fields}


def events_of(text: str) -> list[Any]:
    """The events of an SSE body, decoded; every byte of it must be part of one."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def send_request(served: Served, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    """A raw connection with the request sent."""
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def test_a_stream_on_the_wire(served: Served) -> None:
    with served.client() as client:
        response = client.post("/v1/chat/completions", json=body_of(stream=True, max_tokens=2))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    events = events_of(response.text)
    assert events.pop() == "[DONE]"
    head = {key: events[0][key] for key in ("id", "object", "created", "model")}
    assert head["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    assert events == [
        {**head, "choices": [{**choice, "delta": {"role": "assistant", "content": ""}}]},
        {**head, "choices": [{**choice, "delta": {"content": "T"}}]},
        {**head, "choices": [{**choice, "delta": {"content": "h"}}]},
        {**head, "choices": [{**choice, "delta": {}, "finish_reason": "length", "stop_reason": None}]},
    ]


def test_the_first_token_is_sent_at_once(served: Served) -> None:
    def second_comes_late(request, number):
        served.gateway.delay_s = 30 if number == 0 else 0
        return

    served.gateway.fail = second_comes_late
    with send_request(served, body_of(stream=True, max_tokens=50)) as connection:
        seen = b""
        while b'"content":"T"' not in seen:
            seen += connection.recv(65536)
        assert seen.count(b"data: ") == 2, "role and first token"
    served.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_aborts_all_its_requests(served: Served, stream: bool, n: int) -> None:
    served.gateway.delay_s = 0.002
    connection = send_request(served, body_of(stream=stream, n=n, max_tokens=2000))
    deadline = time.monotonic() + 5
    while len(served.gateway.open_ids) < n:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    if stream:
        connection.recv(100)
    connection.close()
    served.wait_idle()
    assert len(served.gateway.ended) == n
    assert set(served.gateway.ended.values()) <= {"closed", "abort"}
    status = "200" if stream else "499"
    while not served.metric("sonar_http_requests_total", endpoint="/v1/chat/completions", status=status):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_client_that_does_not_read_stalls_nobody_and_is_dropped() -> None:
    gateway = FakeGateway(max_model_len=10_000_000)
    with serve(gateway, ApiSettings(send_timeout_s=1.0)) as served:
        idle = socket.socket()
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect(("127.0.0.1", served.port))
        raw = json.dumps(body_of(stream=True, max_tokens=5_000_000, ignore_eos=True)).encode()
        idle.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        with served.client() as client:
            for _ in range(3):
                answer = client.post("/v1/chat/completions", json=body_of(max_tokens=20))
                assert answer.json()["usage"]["completion_tokens"] == 20
        idle_id = gateway.requests[0].request_id
        assert idle_id in gateway.open_ids
        served.wait_idle()
        assert gateway.ended[idle_id] in ("closed", "abort")
        assert idle_id in {request_id for request_id, _ in gateway.aborts}
        idle.close()


async def test_many_streams_at_once_each_get_their_own(served: Served) -> None:
    served.gateway.delay_s = 0.001

    async def one(client: httpx.AsyncClient, seed: int) -> str:
        text = ""
        async with client.stream(
            "POST", "/v1/completions", json={"model": "fake", "prompt": "x", "seed": seed, "stream": True}
        ) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=30, limits=limits) as client:
        texts = await asyncio.gather(*(one(client, seed) for seed in range(64)))
    raw = served.gateway.text * 3
    assert texts == [raw[seed % len(served.gateway.text) :][:16].decode("utf-8", "replace") for seed in range(64)]
    assert served.metric("sonar_sequences_finished_total", model="fake", reason="length") == 64
    assert served.metric("sonar_output_tokens_sum", model="fake") == 64 * 16
    assert served.metric("sonar_ttft_seconds_count", model="fake") == 64
    assert served.metric("sonar_itl_seconds_count", model="fake") == 64 * 15
    assert served.metric("sonar_http_open_requests") == 0


def test_requests_on_one_connection_follow_a_stopped_stream(served: Served) -> None:
    with served.client() as client:
        for _ in range(5):
            answer = client.post("/v1/chat/completions", json=body_of(stop="quick", stream=True))
            assert events_of(answer.text)[-1] == "[DONE]"
            assert client.get("/health").status_code == 200
    served.wait_idle()
    assert set(served.gateway.ended.values()) == {"stop"}
