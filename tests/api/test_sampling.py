"""Request fields to sampling settings and to one request a sequence."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.api.errors import ApiError
from cluster.api.prompts import Prompt
from cluster.api.sampling import (
    SequenceIds,
    chat_max_tokens,
    completion_max_tokens,
    num_computed,
    sampling_params,
    sequences,
)
from cluster.api.schemas import ChatCompletionRequest, CompletionRequest
from cluster.gateway import ServedModel
from sonar.errors import UserError
from sonar.sampling_params import SamplingParams, child_seed
from tests.api.fakes import byte_tokenizer

TOKENIZER = byte_tokenizer()
MODEL = ServedModel("m", "/x", 20, 0, True)


def params(**fields: Any) -> SamplingParams:
    form = {name: fields.pop(name, None) for name in ("max_tokens", "logprobs", "prompt_logprobs")}
    return sampling_params(CompletionRequest(model="m", prompt="", **fields), TOKENIZER, **form)


def test_every_sampler_field_arrives() -> None:
    given = {
        "n": 3,
        "seed": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.3,
        "ignore_eos": True,
        "max_tokens": 11,
        "logprobs": 4,
        "prompt_logprobs": 1,
    }
    made = params(
        **given,
        logit_bias={"5": 1.5},
        stop=["x", "y"],
        stop_token_ids=[65],
        bad_words=["no"],
        include_stop_str_in_output=True,
    )
    assert made == SamplingParams(
        **given,
        logit_bias={5: 1.5},
        stop=("x", "y"),
        stop_token_ids=(65,),
        bad_words=((110, 111), (32, 110, 111)),
        include_stop_in_output=True,
    )
    # A field added to SamplingParams must be fed from a request, or this fails.
    assert all(getattr(made, name) != getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__)


def test_absent_fields_are_off_and_the_seed_is_chosen() -> None:
    made = params()
    assert made.seed is not None
    assert made == SamplingParams(seed=made.seed)
    assert params().seed != made.seed


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"seed": -1}, "seed"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 101}}, "logit_bias[3]"),
    ],
)
def test_out_of_range_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((ApiError, UserError)) as caught:
        params(**fields)
    assert caught.value.param == param


def test_max_tokens_of_the_two_forms() -> None:
    def chat(**fields: int) -> int | None:
        return chat_max_tokens(ChatCompletionRequest(model="m", messages=[], **fields))

    assert chat() is None
    assert chat(max_tokens=3) == chat(max_completion_tokens=3) == chat(max_tokens=3, max_completion_tokens=3) == 3
    with pytest.raises(ApiError, match="differ"):
        chat(max_tokens=3, max_completion_tokens=4)

    def completion(**fields: Any) -> int:
        return completion_max_tokens(CompletionRequest(model="m", prompt="", **fields))

    assert completion() == 16
    assert completion(max_tokens=0, echo=True) == 1
    with pytest.raises(ApiError, match="echo"):
        completion(max_tokens=0)


@pytest.mark.parametrize(
    "fields,count",
    [({}, 1), ({"n": 3}, 3), ({"best_of": 4}, 4), ({"n": 2, "best_of": 2, "stream": True}, 2), ({"n": 0}, 0)],
)
def test_best_of_or_n_sequences_are_computed(fields: dict[str, Any], count: int) -> None:
    assert num_computed(CompletionRequest(model="m", prompt="", **fields)) == count


@pytest.mark.parametrize(
    "fields", [{"n": 3, "best_of": 2}, {"best_of": 0}, {"best_of": 65}, {"best_of": 2, "stream": True}]
)
def test_best_of_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        num_computed(CompletionRequest(model="m", prompt="", **fields))
    assert caught.value.param == "best_of"


def test_each_sequence_has_its_seed_and_room() -> None:
    ids = SequenceIds("cmpl-1", 5.0, priority=-2, cache_salt="s")
    made = sequences(Prompt([1] * 15), SamplingParams(n=3, seed=9, max_tokens=10), 3, MODEL, ids, 6)
    assert [r.request_id for r in made] == ["cmpl-1-6", "cmpl-1-7", "cmpl-1-8"]
    assert [r.sampling.seed for r in made] == [9, child_seed(9, 1), child_seed(9, 2)]
    assert {(r.sampling.n, r.sampling.max_tokens, r.priority, r.cache_salt, r.arrival_s) for r in made} == {
        (1, 5, -2, "s", 5.0)
    }
    assert (
        sequences(Prompt([1] * 15), SamplingParams(seed=9, max_tokens=2), 1, MODEL, ids, 0)[0].sampling.max_tokens == 2
    )


def test_min_tokens_must_fit_behind_the_prompt() -> None:
    with pytest.raises(ApiError, match="leaves room for 5"):
        sequences(Prompt([1] * 15), SamplingParams(seed=1, min_tokens=6), 1, MODEL, SequenceIds("r", 0.0), 0)


def test_child_seeds_differ_and_stay_in_range() -> None:
    seeds = [child_seed(seed, index) for seed in (0, 1, 2, 2**63 - 1) for index in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert child_seed(42, 0) == 42
    # Pinned: a client that repeats a request with its seed must get the same choices from any later version.
    assert child_seed(42, 1) == 4_456_085_495_900_499_605
