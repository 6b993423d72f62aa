"""Bodies that are not what they should be: a clear 400 that names the field, or 413, never anything else."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.requests import Request

from cluster.api import asgi
from cluster.api.asgi import ClientGoneError, LingeringResponse
from cluster.api.body import BodyReader, check_depth, read_body
from cluster.api.errors import ApiError
from cluster.api.schemas import CompletionRequest
from cluster.api.settings import ApiSettings

SETTINGS = ApiSettings(max_body_bytes=100, max_json_depth=8, body_timeout_s=0.05)
READER = BodyReader(CompletionRequest, SETTINGS)


@pytest.mark.parametrize(
    "body,param,code",
    [
        (b"", None, "invalid_json"),
        (b"{", None, "invalid_json"),
        (b"nonsense", None, "invalid_json"),
        (b'{"model":"m","prompt":"a"} x', None, "invalid_json"),
        (b'{"model":"m","prompt":"\xff"}', None, "invalid_json"),
        (b'{"model":"m","prompt":"\\ud800"}', None, "invalid_json"),
        (b'{"model":"m","prompt":"a","temperature":NaN}', None, "invalid_json"),
        (b'{"model":"m","prompt":"a","temperature":-Infinity}', None, "invalid_json"),
        (b'{"model":"m","prompt":"a","temperature":1e999}', "temperature", "invalid_type"),
        (b"[]", None, "invalid_type"),
        (b'"text"', None, "invalid_type"),
        (b"null", None, "invalid_type"),
        (b'{"prompt":"a"}', "model", "missing_required_parameter"),
        (b'{"model":"m"}', "prompt", "missing_required_parameter"),
        (b'{"model":"m","prompt":{}}', "prompt", "invalid_type"),
        (b'{"model":"m","prompt":[1.5]}', "prompt[0]", "invalid_type"),
        (b'{"model":"m","prompt":[[1,"a"]]}', "prompt[0][1]", "invalid_type"),
        (b'{"model":"m","prompt":[-1]}', "prompt[0]", "invalid_type"),
        (b'{"model":"m","prompt":"a","max_tokens":"5"}', "max_tokens", "invalid_type"),
        (b'{"model":"m","prompt":"a","max_tokens":true}', "max_tokens", "invalid_type"),
        (b'{"model":"m","prompt":"a","max_tokens":1.5}', "max_tokens", "invalid_type"),
        (b'{"model":"m","prompt":"a","seed":99999999999999999999}', "seed", "invalid_type"),
        (b'{"model":"m","prompt":"a","seed":' + b"9" * 10_000 + b"}", "seed", "invalid_type"),
        (b'{"model":"m","prompt":"a","stream":"yes"}', "stream", "invalid_type"),
        (b'{"model":"m","prompt":"a","stream_options":{"x":1}}', "stream_options", "invalid_type"),
        (b'{"model":"m","prompt":"a","response_format":{}}', "response_format.type", "missing_required_parameter"),
        (b'{"model":"m","prompt":' + b"[" * 100_000, None, "nesting_too_deep"),
    ],
)
def test_bad_bodies(body: bytes, param: str | None, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        READER.decode(body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert json.loads(caught.value.body())["error"]["type"] == "invalid_request_error"


def test_null_means_not_given() -> None:
    nulls = {name: None for name in READER.served if name not in ("model", "prompt")}
    body = READER.decode(json.dumps({"model": "m", "prompt": "a", **nulls}).encode())
    assert body == CompletionRequest(model="m", prompt="a")


@pytest.mark.parametrize("depth", [1, 2, 7, 8, 9, 50])
def test_depth_is_counted_in_boxes(depth: int) -> None:
    value: object = 1
    for level in range(depth):
        value = [0, value] if level % 2 else {"k": value}
    if depth <= 8:
        check_depth(value, 8)
    else:
        with pytest.raises(ApiError, match="more than 8 deep"):
            check_depth(value, 8)


def request_of(chunks: list[bytes | None], headers: dict[str, str] | None = None) -> Request:
    """A request whose body comes in these chunks; None: the client goes away."""
    messages = [
        {"type": "http.disconnect"}
        if chunk is None
        else {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
        for number, chunk in enumerate(chunks)
    ]

    async def receive():
        if not messages:
            await asyncio.sleep(10)
        return messages.pop(0)

    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "headers": raw}, receive)


async def test_a_body_is_joined_up_to_the_limit() -> None:
    assert await read_body(request_of([b"a" * 60, b"b" * 40]), SETTINGS) == b"a" * 60 + b"b" * 40


@pytest.mark.parametrize("chunks", [[b"a" * 101], [b"a" * 60, b"b" * 41], [b"a" * 99, b"b" * 99, b"c" * 99]])
async def test_one_byte_more_is_refused(chunks: list[bytes]) -> None:
    with pytest.raises(ApiError) as caught:
        await read_body(request_of(chunks), SETTINGS)
    assert caught.value.status == 413
    assert "100 bytes" in caught.value.message


async def test_what_is_announced_as_too_much_is_refused_before_it_comes() -> None:
    with pytest.raises(ApiError) as caught:
        await read_body(request_of([], {"Content-Length": "101"}), SETTINGS)
    assert caught.value.status == 413


async def test_a_refused_client_that_sends_on_is_heard_to_its_end_or_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "LINGER_BYTES", 250)
    monkeypatch.setattr(asgi, "LINGER_S", 0.05)
    for chunks, num_read in (([b"a" * 100] * 2, 2), ([b"a" * 100] * 9, 3), ([], 0), ([None], 1)):
        left, sent = [*chunks], []

        async def receive(left=left):
            if not left:
                await asyncio.sleep(10)
            chunk = left.pop(0)
            return (
                {"type": "http.request", "body": chunk, "more_body": bool(left)}
                if chunk
                else {"type": "http.disconnect"}
            )

        async def send(message, sent=sent):
            sent.append(message)

        await LingeringResponse(b"no", 413)({"type": "http"}, receive, send)
        assert len(chunks) - len(left) == num_read
        assert [message.get("more_body") for message in sent] == [None, True, False]


async def test_a_body_that_does_not_come_ends_in_408() -> None:
    request = request_of([b"a", b"b"])
    await request.receive()
    with pytest.raises(ApiError) as caught:
        await read_body(request_of([], {}), SETTINGS)
    assert caught.value.status == 408


async def test_a_client_that_leaves_while_sending_is_gone() -> None:
    with pytest.raises(ClientGoneError):
        await read_body(request_of([b"a", None, b""]), SETTINGS)


async def test_compressed_bodies_are_refused() -> None:
    with pytest.raises(ApiError) as caught:
        await read_body(request_of([b"a"], {"Content-Encoding": "gzip"}), SETTINGS)
    assert caught.value.status == 415
