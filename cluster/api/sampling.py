"""From request fields to `SamplingParams` and to one `GenerateRequest` a sequence. Pure but for the random seed.

Ranges are `SamplingParams`' own; here are the rules that need a vocabulary, a prompt or more than one field.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cluster.api.errors import invalid
from cluster.api.prompts import Prompt, check_length, checked_ids
from cluster.api.schemas import ChatCompletionRequest, CompletionRequest, SamplerFields
from cluster.gateway import GenerateRequest, ServedModel
from sonar.sampling_params import MAX_N, SamplingParams, child_seed
from sonar.tokenizer import Tokenizer, find_bad_words

# Each stop string and bad word is looked for at every token.
MAX_STRINGS = 64
MAX_STRING_CHARS = 1024

# OpenAI's own default for /v1/completions; chat has none and runs to the context's end.
COMPLETION_MAX_TOKENS = 16


def sampling_params(
    request: SamplerFields,
    tokenizer: Tokenizer,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The checked sampling settings of a request; seed set, n kept, max_tokens not yet cut to the context.

    Args:
        max_tokens, logprobs, prompt_logprobs: as the endpoint's form resolves them.

    Raises:
        UserError, ApiError: a value is out of range.
    """
    given = {name: getattr(request, name) for name in _PLAIN if getattr(request, name) is not None}
    vocab_size = tokenizer.vocab_size
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        stop=_strings("stop", request.stop),
        stop_token_ids=tuple(checked_ids(request.stop_token_ids or [], vocab_size, "stop_token_ids")),
        bad_words=find_bad_words(tokenizer, _strings("bad_words", request.bad_words)),
        include_stop_in_output=bool(request.include_stop_str_in_output),
    )


_PLAIN = (
    "n",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


def chat_max_tokens(request: ChatCompletionRequest) -> int | None:
    """max_completion_tokens, or its old name max_tokens."""
    if request.max_completion_tokens is None:
        return request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise invalid(
            f"max_tokens={request.max_tokens} and max_completion_tokens={request.max_completion_tokens} differ; "
            "send one of them",
            param="max_completion_tokens",
        )
    return request.max_completion_tokens


def completion_max_tokens(request: CompletionRequest) -> int:
    """max_tokens; 0 (score the prompt only) becomes the 1 token that is computed and not shown."""
    if request.max_tokens != 0:
        return COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if not request.echo:
        raise invalid("max_tokens=0 needs echo=true; send at least 1", param="max_tokens")
    return 1


def num_computed(request: SamplerFields) -> int:
    """Sequences to compute for each prompt: best_of, or n.

    Raises:
        ApiError: best_of is below n or cannot be streamed.
    """
    num_shown = 1 if request.n is None else request.n
    if request.best_of is None:
        return num_shown
    if not max(1, num_shown) <= request.best_of <= MAX_N:
        raise invalid(f"best_of={request.best_of}; must be from n={num_shown} to {MAX_N}", param="best_of")
    if request.best_of > num_shown and request.stream:
        raise invalid(
            f"best_of={request.best_of} cannot be streamed with n={num_shown}: the best is known only at the end",
            param="best_of",
        )
    return request.best_of


@dataclass(frozen=True)
class SequenceIds:
    """What names a request's sequences. response_id: of the HTTP response; arrival_s: monotonic."""

    response_id: str
    arrival_s: float
    priority: int = 0
    cache_salt: str = ""


def sequences(
    prompt: Prompt, params: SamplingParams, count: int, model: ServedModel, ids: SequenceIds, first_index: int
) -> list[GenerateRequest]:
    """The requests that continue one prompt. Sequence i draws with `child_seed(seed, i)`, so each prompt of a list gets
    what it would get alone.

    Args:
        first_index: number of the first of them in the HTTP response.

    Raises:
        ApiError: the prompt is empty or too long, or min_tokens does not fit behind it.
    """
    check_length(prompt, model.max_model_len, "prompt")
    room = model.max_model_len - len(prompt.token_ids)
    if params.min_tokens > room:
        raise invalid(
            f"min_tokens={params.min_tokens}, but a prompt of {len(prompt.token_ids)} tokens leaves room for {room} in "
            f"the context of {model.max_model_len}",
            param="min_tokens",
        )
    max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
    assert params.seed is not None, "sampling_params chooses a seed"
    return [
        GenerateRequest(
            request_id=f"{ids.response_id}-{first_index + index}",
            model=model.name,
            prompt_token_ids=prompt.token_ids,
            sampling=msgspec.structs.replace(params, n=1, max_tokens=max_tokens, seed=child_seed(params.seed, index)),
            priority=ids.priority,
            cache_salt=ids.cache_salt,
            arrival_s=ids.arrival_s,
        )
        for index in range(count)
    ]


def _strings(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """A text or texts as a tuple, checked for number and length."""
    strings = (value,) if isinstance(value, str) else tuple(value or ())
    if len(strings) > MAX_STRINGS:
        raise invalid(f"{name} has {len(strings)} entries; at most {MAX_STRINGS}", param=name)
    longest = max(map(len, strings), default=0)
    if longest > MAX_STRING_CHARS:
        raise invalid(f"{name} has an entry of {longest} characters; at most {MAX_STRING_CHARS}", param=name)
    return strings


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    """Keys as token ids; JSON has only texts for keys."""
    checked = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
            raise invalid(
                f"logit_bias: {key[:100]!r} is no token id of the vocabulary of {vocab_size}", param="logit_bias"
            )
        checked[int(key)] = bias
    return checked
