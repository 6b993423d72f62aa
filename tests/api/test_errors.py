"""Which exception becomes which status, and settings that cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.api.errors import MAX_MESSAGE_CHARS, ApiError, to_api_error
from cluster.api.settings import ApiSettings
from sonar.errors import CapacityError, ConfigError, ModelError, RemoteError, UserError


@pytest.mark.parametrize(
    "error,status,code,kind",
    [
        (ApiError(413, "long", code="body_too_large"), 413, "body_too_large", "invalid_request_error"),
        (CapacityError("full"), 429, "queue_full", "rate_limit_error"),
        (CapacityError("big", code="kv_cache_too_small"), 400, "kv_cache_too_small", "invalid_request_error"),
        (CapacityError("bye", code="server_stopping"), 503, "server_stopping", "server_error"),
        (UserError("bad", param="top_p"), 400, "invalid_value", "invalid_request_error"),
        (UserError("gone", code="model_not_found"), 404, "model_not_found", "invalid_request_error"),
        (ModelError("no template", code="no_chat_template"), 400, "no_chat_template", "invalid_request_error"),
        (RemoteError("rank 3 died"), 500, "internal_error", "server_error"),
        (ValueError("secret"), 500, "internal_error", "server_error"),
        (AssertionError("secret"), 500, "internal_error", "server_error"),
    ],
)
def test_statuses(error: Exception, status: int, code: str, kind: str) -> None:
    told = to_api_error(error, retry_after_s=7)
    assert (told.status, told.code, told.error_type) == (status, code, kind)
    assert told.headers == ({"Retry-After": "7"} if status in (429, 503) else {})
    body = json.loads(told.body())["error"]
    assert (body["type"], body["code"], body["param"]) == (kind, code, getattr(error, "param", None))
    assert "secret" not in body["message"]


def test_a_quoted_value_does_not_make_the_answer_long() -> None:
    assert len(ApiError(400, "x" * 10_000_000).message) <= MAX_MESSAGE_CHARS + 3


@pytest.mark.parametrize(
    "fields",
    [
        {"api_keys": ("",)},
        {"api_keys": ("a b ",)},
        {"api_keys": ("ключ",)},
        {"max_body_bytes": 0},
        {"max_json_depth": 201},
        {"max_choices": 0},
        {"send_timeout_s": 0.0},
        {"ready_interval_s": float("nan")},
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ApiSettings(**fields)
    assert caught.value.param == next(iter(fields))
