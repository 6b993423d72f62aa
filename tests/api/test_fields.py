"""No field is ignored in silence: served, inert, off, or refused by name."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.body import BodyReader
from cluster.api.errors import ApiError
from cluster.api.fields import INERT, OTHER_NAMES, REFUSED, check_fields
from cluster.api.schemas import ChatCompletionRequest, CompletionRequest
from cluster.api.settings import ApiSettings

CHAT = BodyReader(ChatCompletionRequest, ApiSettings())
SERVED = CHAT.served


def check(**fields: object) -> None:
    check_fields(msgspec.json.decode(msgspec.json.encode(fields), type=dict[str, msgspec.Raw]), SERVED)


def refusal(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check(**fields)
    assert caught.value.status == 400
    return caught.value


def test_no_name_is_in_two_lists() -> None:
    completion = BodyReader(CompletionRequest, ApiSettings()).served
    lists = [SERVED | completion, INERT, frozenset(REFUSED), frozenset(OTHER_NAMES)]
    assert sum(map(len, lists)) == len(frozenset().union(*lists))
    assert set(OTHER_NAMES.values()) <= SERVED | completion


@pytest.mark.parametrize("name", sorted(INERT))
def test_inert_fields_pass(name: str) -> None:
    check(**{name: {"any": ["thing"]}})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_pass_with_null_and_off_values_only(name: str) -> None:
    check(**{name: None})
    for off in REFUSED[name].off:
        check(**{name: off})
    if REFUSED[name].any_value:
        check(**{name: 17.5})
    else:
        error = refusal(**{name: "surely on"})
        assert (error.param, error.code) == (name, "unsupported_parameter")


def test_off_values_pass_as_floats_but_not_as_booleans() -> None:
    check(mirostat_mode=0, tfs=1.0, top_a=0.0)
    refusal(mirostat_mode=False)
    refusal(tfs=True)


@pytest.mark.parametrize(
    "name,near", [("temprature", "temperature"), ("max_token", "max_tokens"), ("rep_pen", "repetition_penalty")]
)
def test_an_unknown_field_is_named_with_the_nearest_served_one(name: str, near: str) -> None:
    error = refusal(**{name: 1})
    assert (error.param, error.code) == (name, "unknown_parameter")
    assert f"did you mean {near}?" in error.message
    assert "min_p" in error.message, "says what is served"


def test_a_name_near_none_is_a_sentence_of_its_own() -> None:
    assert refusal(zzzzzzzz=1).message.startswith("unknown field 'zzzzzzzz'. Served here: ")


def test_tools_pass_only_when_they_cannot_be_called() -> None:
    tool = [{"type": "function", "function": {"name": "f"}}]
    check(tools=tool, tool_choice="none")
    assert refusal(tools=tool).param == "tools"
    assert refusal(tools=tool, tool_choice="auto").param == "tools"
    assert refusal(tool_choice="auto").param == "tool_choice"


def test_the_operator_can_let_names_through() -> None:
    settings = ApiSettings(ignored_fields=("trace_id",))
    body = b'{"model":"m","messages":[],"trace_id":7}'
    assert BodyReader(ChatCompletionRequest, settings).decode(body).model == "m"
    with pytest.raises(ApiError, match="trace_id"):
        CHAT.decode(body)


@given(st.text(max_size=40), st.integers())
def test_any_other_name_is_refused_and_said(name: str, value: int) -> None:
    if name in SERVED | INERT | REFUSED.keys():
        return
    assert refusal(**{name: value}).param == name
