"""The official `openai` client against the server: what it gets must parse, and be right."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from cluster.api.settings import ApiSettings
from sonar.messages import FinishReason
from sonar.sampling_params import child_seed
from tests.api.conftest import Served, serve
from tests.api.fakes import TEXT, FakeGateway

MESSAGES: Any = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
NUM_PROMPT = len("[system]be kind\n[user]hi\n[assistant]")


def expected(num_bytes: int, seed: int = 0) -> str:
    """What the fake gateway says."""
    raw = TEXT.encode() * 40
    start = seed % 1000 % len(TEXT.encode())
    return raw[start : start + num_bytes].decode("utf-8", "replace")


def test_chat(served: Served) -> None:
    served.gateway.num_cached = 5
    got = served.openai().chat.completions.create(model="fake", messages=MESSAGES, seed=0, max_completion_tokens=9)
    assert got.object == "chat.completion"
    assert got.id.startswith("chatcmpl-")
    choice = got.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected(9))
    assert choice.finish_reason == "length"
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (NUM_PROMPT, 9)
    assert got.usage.total_tokens == NUM_PROMPT + 9
    assert got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens == 5
    assert bytes(served.gateway.requests[0].prompt_token_ids) == b"[system]be kind\n[user]hi\n[assistant]"


def test_chat_runs_to_the_end_of_the_context(served: Served) -> None:
    served.gateway.max_model_len = NUM_PROMPT + 30
    got = served.openai().chat.completions.create(model="fake", messages=MESSAGES, seed=0)
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert got.usage.completion_tokens == 30


def test_chat_stream(served: Served) -> None:
    served.gateway.eos_after = 50
    chunks = list(
        served.openai().chat.completions.create(
            model="alias/of-fake", messages=MESSAGES, seed=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert {(c.id, c.model, c.object) for c in chunks} == {(chunks[0].id, "alias/of-fake", "chat.completion.chunk")}
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(deltas) == expected(50)
    assert "�" not in "".join(deltas), "no character is cut"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (NUM_PROMPT, 51)


def test_usage_in_every_chunk(served: Served) -> None:
    chunks = list(
        served.openai().chat.completions.create(
            model="fake",
            messages=MESSAGES,
            stream=True,
            max_tokens=3,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        )
    )
    counts = [c.usage.completion_tokens for c in chunks if c.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(served: Served, stream: bool) -> None:
    served.gateway.per_event = 4
    got = served.openai().completions.create(
        model="fake", prompt="x", seed=0, max_tokens=100, stop=["fox", "dog"], stream=stream
    )
    if stream:
        chunks = list(got)
        assert "".join(c.choices[0].text for c in chunks) == "The quick brown "
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choices[0].stop_reason == "fox"
    else:
        assert (got.choices[0].text, got.choices[0].finish_reason) == ("The quick brown ", "stop")
        assert got.usage.completion_tokens == len("The quick brown fox")
    request_id = served.gateway.requests[0].request_id
    assert served.gateway.aborts == [(request_id, FinishReason.STOP)]
    served.wait_idle()
    assert served.gateway.ended == {request_id: "stop"}


def test_n_choices_draw_with_their_own_seeds(served: Served) -> None:
    client = served.openai()
    got = client.chat.completions.create(model="fake", messages=MESSAGES, seed=7, n=3, max_tokens=5)
    assert [c.index for c in got.choices] == [0, 1, 2]
    assert [c.message.content for c in got.choices] == [expected(5, child_seed(7, i)) for i in range(3)]
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (NUM_PROMPT, 15)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(
        model="fake", messages=MESSAGES, seed=7, n=3, max_tokens=5, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [c.message.content for c in got.choices]


def test_several_prompts_answer_as_they_would_alone(served: Served) -> None:
    client = served.openai()
    got = client.completions.create(model="fake", prompt=["ab", "c"], seed=7, n=2, max_tokens=5)
    alone = client.completions.create(model="fake", prompt="c", seed=7, n=2, max_tokens=5)
    assert [c.index for c in got.choices] == [0, 1, 2, 3]
    assert [c.text for c in got.choices[2:]] == [c.text for c in alone.choices]
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (3 + 2, 20)


def test_token_ids_as_prompts(served: Served) -> None:
    client = served.openai()
    client.completions.create(model="fake", prompt=[1, 2, 3], max_tokens=1)
    client.completions.create(model="fake", prompt=[[4], [5, 6]], max_tokens=1)
    assert [r.prompt_token_ids for r in served.gateway.requests] == [[1, 2, 3], [4], [5, 6]]


def test_chat_logprobs(served: Served) -> None:
    arguments: Any = {"model": "fake", "messages": MESSAGES, "seed": 0, "max_tokens": 3, "logprobs": True}
    client = served.openai()
    got = client.chat.completions.create(**arguments, top_logprobs=2)
    assert got.choices[0].logprobs is not None
    content = got.choices[0].logprobs.content
    assert content is not None
    assert [(item.token, item.bytes) for item in content] == [("T", [84]), ("h", [104]), ("e", [101])]
    assert [(t.token, t.logprob) for t in content[0].top_logprobs] == [("T", -1.0), ("U", -2.0)]
    streamed = []
    for chunk in client.chat.completions.create(**arguments, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [item.token for item in streamed] == ["T", "h", "e"]
    assert streamed[0].top_logprobs == []


def test_completion_logprobs_and_echo(served: Served) -> None:
    arguments: Any = {"model": "fake", "prompt": "hé", "seed": 0, "max_tokens": 2, "logprobs": 1, "echo": True}
    client = served.openai()
    got = client.completions.create(**arguments).choices[0]
    assert got.text == "héTh"
    assert got.logprobs is not None
    assert got.logprobs.tokens == ["<s>", "h", "bytes:\\xc3", "bytes:\\xa9", "T", "h"]
    assert got.logprobs.text_offset == [0, 0, 1, 1, 2, 3]
    assert got.logprobs.token_logprobs is not None
    assert got.logprobs.token_logprobs[0] is None
    assert got.logprobs.top_logprobs is not None
    assert got.logprobs.top_logprobs[1] == {"h": -1.0}
    text, tokens = "", []
    for chunk in client.completions.create(**arguments, stream=True):
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs is not None:
            tokens += chunk.choices[0].logprobs.tokens or []
    assert (text, tokens) == ("héTh", got.logprobs.tokens)


def test_max_tokens_0_scores_a_prompt(served: Served) -> None:
    got = served.openai().completions.create(model="fake", prompt="ab", max_tokens=0, echo=True, logprobs=0)
    assert got.choices[0].text == "ab"
    assert got.choices[0].logprobs is not None
    assert got.choices[0].logprobs.token_logprobs == [None, -1.0, -1.0]
    assert got.usage is not None
    assert got.usage.completion_tokens == 0
    *_, last = served.openai().completions.create(
        model="fake", prompt="ab", max_tokens=0, echo=True, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage is not None
    assert last.usage.completion_tokens == 0


def test_best_of_shows_the_most_likely(served: Served) -> None:
    best = child_seed(3, 2)
    served.gateway.drawn_logprob = lambda request: -0.25 if request.sampling.seed == best else -1.0
    got = served.openai().completions.create(model="fake", prompt="ab", seed=3, best_of=4, max_tokens=5)
    assert [c.text for c in got.choices] == [expected(5, best)]
    assert got.choices[0].index == 0
    assert got.choices[0].logprobs is None
    assert got.usage is not None
    assert got.usage.completion_tokens == 20, "what was computed counts"


def test_prompt_logprobs(served: Served) -> None:
    got = served.openai().completions.create(model="fake", prompt=[65, 66], extra_body={"prompt_logprobs": 0})
    assert got.choices[0].prompt_logprobs == [  # type: ignore[attr-defined]
        None,
        {"66": {"logprob": -1.0, "rank": 1, "decoded_token": "B"}},
    ]


def test_logprobs_of_a_long_prompt_are_written_aside(served: Served) -> None:
    prompt = [65] * 1500
    arguments: Any = {"model": "fake", "prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 5}
    client = served.openai()
    whole = client.completions.create(**arguments, extra_body={"prompt_logprobs": 5}).choices[0]
    assert len(whole.prompt_logprobs) == 1500  # type: ignore[attr-defined]
    assert whole.logprobs is not None
    assert whole.logprobs.tokens is not None
    assert len(whole.logprobs.tokens) == 1502
    tokens: list[str] = []
    for chunk in client.completions.create(**arguments, stream=True):
        tokens += (chunk.choices[0].logprobs.tokens or []) if chunk.choices[0].logprobs else []
    assert tokens[:1500] == whole.logprobs.tokens[:1500]
    assert len(tokens) == 1502


def test_models(served: Served) -> None:
    client = served.openai()
    assert [model.id for model in client.models.list()] == ["fake", "alias/of-fake"]
    assert client.models.retrieve("alias/of-fake").owned_by == "sonar"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_sonar_fields_travel_as_extra_body(served: Served) -> None:
    served.openai().chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=1,
        user="someone",
        metadata={"a": "b"},
        extra_body={"top_k": 5, "min_p": 0.1, "priority": -3, "cache_salt": "tenant", "bad_words": ["no"]},
    )
    request = served.gateway.requests[0]
    assert (request.sampling.top_k, request.sampling.min_p) == (5, 0.1)
    assert (request.priority, request.cache_salt) == (-3, "tenant")
    assert request.sampling.bad_words == ((110, 111), (32, 110, 111))
    assert request.sampling.seed is not None


def test_errors_are_the_clients_own_classes(served: Served) -> None:
    client = served.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt="x" * 3000)
    assert long.value.code == "context_length_exceeded"
    assert "3001" in long.value.message
    assert "2048" in long.value.message
    served.gateway.queue_size = 0
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model="fake", prompt="x", stream=True)
    assert full.value.response.headers["retry-after"] == "1"
    served.gateway.ready = False
    with pytest.raises(openai.InternalServerError) as down:
        client.completions.create(model="fake", prompt="x")
    assert (down.value.status_code, down.value.code) == (503, "model_not_ready")
    served.gateway.is_recovering = True  # its requests wait for the replica
    served.gateway.queue_size = 10
    assert client.completions.create(model="fake", prompt="x", max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("kv_cache_too_small", 400, "kv_cache_too_small"),
        ("invalid_value", 400, "invalid_value"),
        ("queue_full", 429, "queue_full"),
        ("", 500, "generation_failed"),
    ],
)
def test_what_a_replica_refuses_has_the_status_of_its_cause(served: Served, code: str, status: int, told: str) -> None:
    served.gateway.fail = lambda request, number: "does not fit"
    served.gateway.error_code = code
    with pytest.raises(openai.APIStatusError) as refused:
        served.openai().completions.create(model="fake", prompt="x")
    assert (refused.value.status_code, refused.value.code) == (status, told)
    assert "does not fit" in refused.value.message


def test_an_error_before_the_first_token_has_a_status(served: Served) -> None:
    served.gateway.fail = lambda request, number: "the replica is lost"
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="the replica is lost"):
            served.openai().completions.create(model="fake", prompt="x", stream=stream)


def test_an_error_after_it_is_an_event_and_the_end(served: Served) -> None:
    served.gateway.fail = lambda request, number: "the replica is lost" if number == 4 else None
    texts = []
    with pytest.raises(openai.APIError, match="the replica is lost"):
        for chunk in served.openai().completions.create(model="fake", prompt="x", seed=0, stream=True):
            texts.append(chunk.choices[0].text)
    assert "".join(texts) == expected(4)
    assert served.gateway.open_ids == {}


def test_keys() -> None:
    with serve(FakeGateway(), ApiSettings(api_keys=("first", "second"))) as served:
        for key in ("first", "second"):
            assert served.openai(key).models.list().data
        with pytest.raises(openai.AuthenticationError) as refused:
            served.openai("third").models.list()
        assert refused.value.code == "invalid_api_key"
