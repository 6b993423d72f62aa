"""Messages, texts and ids to prompts, and the errors on the way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from cluster.api.errors import ApiError
from cluster.api.prompts import (
    Prompt,
    PromptBuilder,
    check_countable,
    check_least,
    check_length,
    normalize_messages,
)
from cluster.api.schemas import ChatCompletionRequest
from cluster.api.settings import ApiSettings
from cluster.api.tokenizers import TokenizerPool
from tests.api.fakes import BOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
SETTINGS = ApiSettings(max_choices=4, trust_request_chat_template=True)
BUILDER = PromptBuilder(TokenizerPool(lambda path: TOKENIZER, SETTINGS), SETTINGS)


FITS = partial(check_least, max_model_len=5000, param="prompt")


def text_part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_messages_become_texts() -> None:
    messages = normalize_messages(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [text_part("one"), text_part("two")], "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ]
    )
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    "messages,param",
    [
        ([], "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "usr", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": ["x"]}], "messages[1].content[0]"),
        ([{"role": "user", "content": [text_part(5)]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": {"a": 1}}]}], "messages[0].content[0]"),
    ],
)
def test_bad_messages_are_named(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        normalize_messages(messages)
    assert (caught.value.status, caught.value.param) == (400, param)


async def chat(**fields: Any) -> str:
    messages = fields.pop("messages", [{"role": "user", "content": "hi"}])
    prompt = await BUILDER.from_chat(TOKENIZER, ChatCompletionRequest(model="m", messages=messages, **fields), FITS)
    assert prompt.text is not None
    assert prompt.token_ids == TOKENIZER.encode(prompt.text, add_special_tokens=False)
    return prompt.text


async def test_chat_templates_get_what_the_request_says() -> None:
    assert await chat() == "[user]hi\n[assistant]"
    assert await chat(add_generation_prompt=False) == "[user]hi\n"
    assert await chat(chat_template_kwargs={"effort": 1}) == "[user]hi\n(1)[assistant]"
    assert await chat(chat_template="T{{ reasoning_effort }}{{ bos_token }}", reasoning_effort="low") == "Tlow<s>"


ANSWERED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]


async def test_the_last_message_is_continued_where_its_content_ends() -> None:
    assert await chat(continue_final_message=True, messages=ANSWERED) == "[user]hi\n[assistant]Well, "
    trims = "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
    assert await chat(continue_final_message=True, messages=ANSWERED, chat_template=trims) == "hi;Well, "
    with pytest.raises(ApiError, match="cannot be continued"):
        await chat(continue_final_message=True, messages=ANSWERED, chat_template="fixed")


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ],
)
async def test_template_fields_that_contradict(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        await chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_a_request_brings_no_template_unless_trusted() -> None:
    settings = ApiSettings()
    builder = PromptBuilder(TokenizerPool(lambda path: TOKENIZER, settings), settings)
    body = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], chat_template="T")
    with pytest.raises(ApiError, match="trust_request_chat_template"):
        await builder.from_chat(TOKENIZER, body, FITS)


async def completion(prompt: Any, **options: bool) -> list[Prompt]:
    return await BUILDER.from_completion(
        TOKENIZER, prompt, FITS, **{"add_special_tokens": False, "with_text": False, **options}
    )


async def test_the_four_forms_of_a_completion_prompt() -> None:
    assert await completion("ab") == [Prompt([97, 98], "ab")]
    assert await completion("ab", add_special_tokens=True) == [Prompt([BOS, 97, 98], "ab")]
    assert await completion(["a", "b"]) == [Prompt([97], "a"), Prompt([98], "b")]
    assert await completion([97, 98]) == [Prompt([97, 98])]
    assert await completion([[97], [98]], with_text=True) == [Prompt([97], "a"), Prompt([98], "b")]


@pytest.mark.parametrize(
    "prompt,match",
    [([], "is empty"), ([1, "a"], "mixes"), ([[1], 1], "mixes"), ([258], "token id 258"), ([[1], [999]], "999")],
)
async def test_bad_completion_prompts(prompt: Any, match: str) -> None:
    with pytest.raises(ApiError, match=match):
        await completion(prompt)


async def test_too_many_prompts_are_refused_before_they_are_tokenized() -> None:
    with pytest.raises(ApiError, match="5 sequences; at most 4"):
        await completion(["a"] * 5)


@pytest.mark.parametrize("size,fits", [(0, False), (1, True), (9, True), (10, False), (11, False)])
def test_a_prompt_must_leave_room_for_a_token(size: int, fits: bool) -> None:
    if fits:
        check_length(Prompt([1] * size), 10, "prompt")
        return
    with pytest.raises(ApiError) as caught:
        check_length(Prompt([1] * size), 10, "prompt")
    if size:
        assert caught.value.code == "context_length_exceeded"
        assert str(size) in caught.value.message
        assert "10 tokens" in caught.value.message


@pytest.fixture
def no_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*args: object, **options: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(TOKENIZER, "encode", encode)


@pytest.mark.usefixtures("no_encoding")
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    text = "7" * 100_000
    calls = [
        chat(messages=[{"role": "user", "content": text}]),
        completion(text),
        completion([text]),
        BUILDER.from_text(TOKENIZER, text, FITS, add_special_tokens=True),
    ]
    for call in calls:
        with pytest.raises(ApiError, match="has at least") as caught:
            await call
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


async def test_a_long_text_that_may_fit_is_tokenized() -> None:
    assert len((await completion("7" * 4999))[0].token_ids) == 4999
    assert len((await completion(["7" * 4999] * 3))[2].token_ids) == 4999


async def test_tokenize_counts_some_contexts_and_no_more() -> None:
    check_countable(80, 10, "prompt")
    with pytest.raises(ApiError, match="at least 81 tokens; /tokenize takes 80 at most") as caught:
        check_countable(81, 10, "prompt")
    assert caught.value.code == "context_length_exceeded"
