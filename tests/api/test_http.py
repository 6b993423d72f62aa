"""The server over plain HTTP: every route, every bad input, in OpenAI's error shape."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.api.settings import ApiSettings
from tests.api.conftest import Served, serve
from tests.api.fakes import EOS, FakeGateway

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """One server for the tests that change nothing."""
    settings = ApiSettings(max_body_bytes=200_000, ready_interval_s=0.05, ready_timeout_s=0.5, version="1.2.3")
    with serve(FakeGateway(), settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(shared: Served) -> Iterator[httpx.Client]:
    with shared.client() as opened:
        yield opened


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response that is one; its shape is checked on the way."""
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    "path,fields,param,code",
    [
        (CHAT, {}, "messages", "missing_required_parameter"),
        (CHAT, {"messages": []}, "messages", "invalid_value"),
        (CHAT, {"messages": "hi"}, "messages", "invalid_type"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", None),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format", None),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema", "x": 1}}, "response_format", None),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs", None),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options", None),
        (CHAT, {"messages": MESSAGES, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", None),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens", None),
        (CHAT, {"messages": MESSAGES, "mirostat_mode": 2}, "mirostat_mode", "unsupported_parameter"),
        (CHAT, {"messages": MESSAGES, "topk": 2}, "topk", "unknown_parameter"),
        (CHAT, {"messages": MESSAGES, "chat_template": "x"}, "chat_template", "unsupported_parameter"),
        (CHAT, {"messages": MESSAGES, "n": 65}, "n", None),
        (COMPLETION, {"prompt": []}, "prompt", None),
        (COMPLETION, {"prompt": [[]]}, "prompt", None),
        (COMPLETION, {"prompt": [258]}, "prompt[0]", None),
        (COMPLETION, {"prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter"),
        (COMPLETION, {"prompt": "x", "best_of": 3, "stream": True}, "best_of", None),
        (COMPLETION, {"prompt": ["x"] * 20, "n": 30}, "prompt", None),
        (COMPLETION, {"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias", None),
        (COMPLETION, {"prompt": "x", "seed": 2**63 - 1, "top_p": 1.5}, "top_p", None),
        (COMPLETION, {"prompt": "x" * 2047}, "prompt", "context_length_exceeded"),
        (COMPLETION, {"prompt": "7" * 100_000}, "prompt", "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "7" * 100_000}]}, "prompt", "context_length_exceeded"),
        ("/tokenize", {"prompt": "7" * 100_000}, "prompt", "context_length_exceeded"),
        ("/tokenize", {}, "prompt", None),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt", None),
        ("/detokenize", {"tokens": [258]}, "tokens", None),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
    ],
)
def test_bad_fields(client: httpx.Client, path: str, fields: dict[str, Any], param: str, code: str | None) -> None:
    response = client.post(path, json={"model": "fake", **fields})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert code is None or error["code"] == code


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b'{"model": NaN}', b"[" * 50_000, b'{"a":' * 20_000]
)
def test_bad_bodies(client: httpx.Client, path: str, body: bytes) -> None:
    response = client.post(path, content=body)
    assert response.status_code == 400
    error_of(response)


def test_a_body_that_is_announced_too_large_is_answered_before_it_is_sent(shared: Served) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=5) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 200001\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
        connection.sendall(b"x" * 200_001)


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize"])
def test_too_large_bodies(client: httpx.Client, path: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 10_000

    for content in (b"x" * 200_001, chunks()):
        response = client.post(path, content=content)
        assert response.status_code == 413
        assert "200000 bytes" in error_of(response)["message"]
        assert response.headers["connection"] == "close"
    assert client.get("/health").status_code == 200


def test_models_that_are_not_served(client: httpx.Client) -> None:
    for response in (
        client.post(CHAT, json={"model": "gpt-9", "messages": MESSAGES}),
        client.post("/tokenize", json={"model": "gpt-9", "prompt": "x"}),
        client.get("/v1/models/gpt-9"),
    ):
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] == "model_not_found"
        assert "alias/of-fake" in error["message"], "says what is served"


def test_unknown_routes_and_methods(client: httpx.Client) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", CHAT, 405), ("PUT", "/health", 405)):
        response = client.request(method, path)
        assert response.status_code == status
        assert error_of(response)["type"] == "invalid_request_error"


def test_other_fields_do_their_work(shared: Served, client: httpx.Client) -> None:
    shared.gateway.requests.clear()
    client.post(COMPLETION, json={"model": "fake", "prompt": "x", "add_special_tokens": False, "max_tokens": 1})
    assert shared.gateway.requests[0].prompt_token_ids == [120]
    body = {"model": "fake", "prompt": "x", "stop_token_ids": [113], "seed": 0, "include_stop_str_in_output": True}
    choice = client.post(COMPLETION, json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The q", "stop", 113)
    del body["include_stop_str_in_output"]
    assert client.post(COMPLETION, json=body).json()["choices"][0]["text"] == "The "


@pytest.mark.parametrize(
    "fields,text", [({}, "The"), ({"skip_special_tokens": True}, "The"), ({"skip_special_tokens": False}, "The</s>")]
)
def test_special_tokens_in_the_output(fields: dict[str, bool], text: str) -> None:
    """eos that does not end the output (ignore_eos) is skipped as the other special tokens are, or shown as asked."""
    gateway = FakeGateway(text=b"The")
    plain = gateway.token
    gateway.token = lambda request, number: EOS if number == 3 else plain(request, number)  # type: ignore[method-assign]
    with serve(gateway, ApiSettings()) as served, served.client() as client:
        body = {"model": "fake", "prompt": "x", "seed": 0, "max_tokens": 4, "ignore_eos": True, **fields}
        assert client.post(COMPLETION, json=body).json()["choices"][0]["text"] == text


def test_tokenize_and_back(client: httpx.Client) -> None:
    got = client.post("/tokenize", json={"model": "fake", "prompt": "hé", "return_token_strs": True}).json()
    assert got == {
        "count": 4,
        "max_model_len": 2048,
        "tokens": [256, 104, 195, 169],
        "token_strs": ["<s>", "h", "�", "�"],
    }
    back = client.post("/detokenize", json={"model": "fake", "tokens": got["tokens"]}).json()
    assert back == {"prompt": "<s>hé"}
    skipped = {"model": "fake", "tokens": got["tokens"], "skip_special_tokens": True}
    assert client.post("/detokenize", json=skipped).json() == {"prompt": "hé"}
    chat = client.post("/tokenize", json={"model": "fake", "messages": MESSAGES}).json()
    assert bytes(chat["tokens"]) == b"[user]hi\n[assistant]"


def test_the_service_routes(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.head("/health").status_code == client.head("/ready").status_code == 200
    assert client.get("/ready").json() == {"ready": True}
    assert client.get("/version").json() == {"version": "1.2.3"}
    assert client.get("/docs").status_code == 200
    document = client.get("/openapi.json").json()
    schema = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "temperature", "min_p", "cache_salt"} <= set(schema)
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'sonar_http_requests_total{endpoint="/health",status="200"}' in metrics.text


def test_ready_says_why_not(served: Served) -> None:
    with served.client() as client:
        served.gateway.probe_result = False
        response = client.get("/ready")
        assert response.status_code == 503
        assert response.json() == {
            "ready": False,
            "reasons": dict.fromkeys(served.gateway.names, "no token came within 0.5 s"),
        }
        assert client.get("/health").status_code == 200
        client.post(COMPLETION, json={"model": "fake", "prompt": "x"})
        assert client.get("/ready").json()["reasons"].keys() == {"alias/of-fake"}, "traffic is proof"
        served.gateway.ready = False
        assert client.get("/ready").json()["reasons"]["fake"] == "no replica takes requests"


def test_an_unexpected_error_tells_nothing_of_the_inside(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    def explode(request, number):
        raise RuntimeError("secret path")

    served.gateway.fail = explode
    with served.client() as client:
        for stream in (False, True):
            response = client.post(COMPLETION, json={"model": "fake", "prompt": "x", "stream": stream})
            assert response.status_code == 500
            assert error_of(response)["code"] == "internal_error"
            assert "secret" not in response.text
    assert "secret path" in caplog.text, "the log has it"


GUARDED = [
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("POST", CHAT),
    ("POST", COMPLETION),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/nope"),
    ("GET", "/health/"),
    ("GET", "//health"),
]


def test_keys_guard_everything_but_health_and_ready() -> None:
    with serve(FakeGateway(), ApiSettings(api_keys=("s3cret", "other"))) as served, served.client() as client:
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        wrong = [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}]
        wrong += [{"Authorization": "Basic s3cret"}, {"Authorization": "Bearer s3cret,other"}, {"api-key": "s3cret"}]
        for method, path in GUARDED:
            for headers in wrong:
                response = client.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path, headers)
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
            for key in ("s3cret", "other"):
                response = client.request(method, path, headers={"Authorization": f"bearer {key}"})
                assert response.status_code != 401, (method, path)
        twice = [("Authorization", "Bearer wrong"), ("Authorization", "Bearer s3cret")]
        assert client.get("/metrics", headers=twice).status_code == 401


def test_every_route_is_guarded_by_default() -> None:
    """A route added later must not be open by accident: all but two answer 401 without a key."""
    with serve(FakeGateway(), ApiSettings(api_keys=("k",))) as served, served.client() as client:
        paths = client.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()["paths"]
        assert len(paths) >= 10
        for path, methods in paths.items():
            for method in methods:
                status = client.request(method.upper(), path.replace("{model_id}", "fake")).status_code
                assert (status == 401) == (path not in ("/health", "/ready")), (method, path)


def test_cors_is_off_unless_asked_for() -> None:
    origin = {"Origin": "http://page.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with serve(FakeGateway(), ApiSettings(api_keys=("k",))) as served, served.client() as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=origin).headers
    settings = ApiSettings(api_keys=("k",), cors_origins=("http://page.example",))
    with serve(FakeGateway(), settings) as served, served.client() as client:
        allowed = client.options(CHAT, headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "http://page.example"
        refused = client.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://page.example", "the page may read why"
        assert client.options(CHAT, headers={**preflight, "Origin": "http://evil.example"}).status_code == 400


def test_errors_in_a_stream_are_json_events(served: Served) -> None:
    served.gateway.fail = lambda request, number: "lost" if number == 2 else None
    with served.client() as client:
        text = client.post(COMPLETION, json={"model": "fake", "prompt": "x", "stream": True}).text
    events = text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: ")) == {
        "error": {"message": "lost", "type": "server_error", "param": None, "code": "generation_failed"}
    }
    assert "[DONE]" not in text
