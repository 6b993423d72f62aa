"""Whatever a client sends, it gets an answer or a 4xx in OpenAI's shape; nothing gives a 5xx or leaves work behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from cluster.api.app import create_app
from cluster.api.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cluster.api.settings import ApiSettings
from tests.api.fakes import FakeGateway, byte_tokenizer

KINDS: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 0.0, -0.0, 1.0, 1e308, 5e-324, 0.5]),
    st.floats(allow_nan=False, allow_infinity=False),
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.text(max_size=12)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "refusal"])}, optional={"text": TEXTS})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "x"])},
    optional={"content": TEXTS | st.none() | st.lists(PARTS, max_size=3) | ANY_JSON, "name": ANY_JSON},
)
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["fake", "fake", "fake", "fake", "no such"]),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "prompt": TEXTS | st.lists(TEXTS, max_size=3) | st.lists(st.integers(0, 300), max_size=6),
    "tokens": st.lists(st.integers(0, 300), max_size=6),
    "max_tokens": st.integers(0, 40),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "257", "258", "-1", "x"]), NUMBERS, max_size=2),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "reasoning_effort": TEXTS,
    "chat_template": st.sampled_from(
        ["{{ messages[0].content }}", "{% if", "{{ 1 / 0 }}", "{{ raise_exception('x') }}"]
    ),
    "chat_template_kwargs": st.dictionaries(TEXTS, ANY_JSON, max_size=2),
}


def values_of(name: str, annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, in and out of range."""
    if name in PLAUSIBLE:
        return PLAUSIBLE[name]
    hint = str(annotation)
    if "bool" in hint:
        return st.booleans()
    if "float" in hint:
        return st.sampled_from([0.0, 0.5, 1.0, 1, -1.0, 2.5, 1e308, 5e-324])
    if "int" in hint and "list" not in hint:
        return st.integers(0, 4) | st.sampled_from([-1, 20, 65, 2**31, 2**63 - 1])
    if "list[str]" in hint:
        return st.lists(TEXTS, max_size=3)
    return st.lists(st.integers(0, 300), max_size=3) if "list" in hint else TEXTS


def bodies(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    """What is required and a few optional fields in their types; half of the bodies have strange ones too."""
    fields = {field.name: values_of(field.name, field.type) for field in msgspec.structs.fields(kind)}
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    optional = [name for name in fields if name not in required]
    right = st.lists(st.sampled_from(optional), max_size=6, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: fields[name] for name in [*required, *chosen]})
    )
    strange = st.dictionaries(st.sampled_from([*fields, "mirostat", "tools", "other"]), ANY_JSON, max_size=3)
    return right | st.builds(lambda a, b: {**a, **b}, right, strange)


class Driver:
    """The application without sockets, on a loop of its own."""

    def __init__(self) -> None:
        self.gateway = FakeGateway(max_model_len=60)
        app = create_app(
            self.gateway,
            ApiSettings(trust_request_chat_template=True),
            registry=CollectorRegistry(),
            load_tokenizer=lambda path: byte_tokenizer(),
        )
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._runner = asyncio.Runner()

    def post(self, path: str, content: bytes) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://api") as client:
                return await client.post(path, content=content)

        return self._runner.run(send())

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


def check(driver: Driver, path: str, content: bytes) -> None:
    response = driver.post(path, content)
    assert response.status_code in (200, 400, 404, 413), (content, response.text)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), response.text
    else:
        assert isinstance(response.json(), dict)
    assert driver.gateway.open_ids == {}


QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("path", KINDS)
@QUICK
@given(data=st.data())
def test_bodies_of_plausible_fields(driver: Driver, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(KINDS[path]))
    check(driver, path, json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("path", KINDS)
@QUICK
@given(body=ANY_JSON)
def test_any_json(driver: Driver, path: str, body: Any) -> None:
    check(driver, path, json.dumps(body).encode())


@pytest.mark.parametrize("path", KINDS)
@QUICK
@given(content=st.binary(max_size=60))
def test_any_bytes(driver: Driver, path: str, content: bytes) -> None:
    check(driver, path, content)


@pytest.mark.parametrize("path", KINDS)
@QUICK
@given(data=st.data())
def test_a_valid_body_with_bytes_changed(driver: Driver, path: str, data: st.DataObject) -> None:
    valid = {
        "model": "fake",
        "max_tokens": 3,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "logit_bias": {"5": 1.5},
        "prompt": "hello",
        "messages": [{"role": "user", "content": "hi"}],
        "tokens": [1, 2],
    }
    served = {field.name for field in msgspec.structs.fields(KINDS[path])}
    content = bytearray(json.dumps({name: value for name, value in valid.items() if name in served}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=2) | st.just(b'"') | st.just(b"[")
        )
    check(driver, path, bytes(content))
