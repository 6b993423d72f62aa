"""Chat templates: what they may use, what they may not do, and what a user is told when one refuses."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from sonar.errors import UserError
from sonar.tokenizer import Tokenizer
from sonar.tokenizer.chat_template import ChatTemplates

CHAT = [{"role": "user", "content": "Hi <&> é"}]
NOON = datetime(2024, 7, 26, 12, 0)


def _render(template: str, messages: list[dict[str, Any]] = CHAT, **variables: Any) -> str:
    templates = ChatTemplates({"default": template}, "tiny-model", lambda: NOON)
    return templates.render(messages, variables.pop("tools", None), True, variables)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi <&> é"}'),
        ("{{ [1, {'a': 2}] | tojson(indent=1) }}", '[\n 1,\n {\n  "a": 2\n }\n]'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for m in messages %}\n  {%- set x = m %}\n    {{ x.content }}\n{% endfor %}\n", "    Hi <&> é\n"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}", "2"),
        ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", "True True True"),
        ("{{ messages[0]['content'].strip().split(' ')[0] | upper }}", "HI"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages | length) }}", "[1]"),
    ],
)
def test_what_templates_rely_on(template: str, expected: str) -> None:
    assert _render(template) == expected


def test_variables_of_the_request() -> None:
    assert _render("{{ enable_thinking }} {{ bos_token }}", enable_thinking=False, bos_token="<s>") == "False <s>"


def test_null_is_absent() -> None:
    call = [{"role": "assistant", "content": None, "tool_calls": []}]
    assert _render("{% if messages[0].content is defined %}{{ messages[0].content }}{% endif %}|", call) == "|"


def test_empty_tools_are_none() -> None:
    assert _render("{{ tools is none }}", tools=[]) == "True"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages[0].content.nothing() }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% for i in range(10000000) %}{% endfor %}", "range|Range"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_refusals_are_the_users_error_with_the_reason(template: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as raised:
        _render(template)
    assert (raised.value.param, raised.value.code) == ("messages", "chat_template_refused")
    assert "tiny-model" in raised.value.message


def test_invalid_template() -> None:
    with pytest.raises(UserError, match="no valid Jinja"):
        _render("{% if %}")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_reserved_variables(name: str) -> None:
    templates = ChatTemplates({"default": ""}, "m")
    with pytest.raises(UserError, match=f"'{name}' is reserved"):
        templates.render(CHAT, None, True, {name: 1})


def test_a_model_without_a_template(pieces: Tokenizer) -> None:
    with pytest.raises(UserError, match="has no chat template") as raised:
        pieces.apply_chat_template(CHAT)
    assert raised.value.code == "no_chat_template"
    assert pieces.apply_chat_template(CHAT, chat_template="{{ messages[0].role }}{{ eos_token }}") == "user</s>"


def test_generation_prompt_and_override(demo: Tokenizer) -> None:
    with_prompt = demo.apply_chat_template(CHAT)
    assert with_prompt.endswith("<|im_start|>assistant\n")
    assert with_prompt.startswith(demo.apply_chat_template(CHAT, add_generation_prompt=False))
    assert demo.apply_chat_template(CHAT, template_kwargs={"x": 3}, chat_template="{{ x }}") == "3"


def test_lone_surrogates_are_the_users_error(demo: Tokenizer, pieces: Tokenizer) -> None:
    for encode in (demo.encode, demo.encode_word_inside, pieces.encode, pieces.encode_word_inside):
        with pytest.raises(UserError, match="lone surrogate at character 2") as raised:
            encode("ab\ud800")
        assert raised.value.code == "invalid_text"
