"""Whether a submitted request can be computed at all, and its fixed facts: `Submit` -> `RequestSpec`.

Knows nothing of load. What would make a rank fail is refused here, so that one bad request never costs the others
their step. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sonar.errors import UserError
from sonar.messages import Submit
from sonar.request import RequestSpec


@dataclass(frozen=True)
class RequestLimits:
    """What the model allows.

    Attributes:
        max_model_len: prompt + output tokens of a request.
        vocab_size: token ids are below it.
        eos_token_ids: ids that end a sequence.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def make_spec(submit: Submit, limits: RequestLimits, order: int, now: float) -> RequestSpec:
    """Checks a request and fixes where it ends: at max_tokens or at the context's end, whichever is first.

    Raises:
        UserError: with field and remedy.
    """
    sampling = submit.sampling
    prompt_len = len(submit.prompt_token_ids)
    if prompt_len == 0:
        raise UserError("the prompt has no tokens; give at least one", param="prompt", code="empty_prompt")
    if prompt_len >= limits.max_model_len:
        raise UserError(
            f"the prompt has {prompt_len} tokens and the context holds {limits.max_model_len}, prompt and output "
            f"together; shorten the prompt to at most {limits.max_model_len - 1} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    if sampling.n != 1:
        raise UserError(f"n={sampling.n} reached the engine; submit one request a sequence", param="n")
    if sampling.seed is None:
        raise UserError("seed is not set; choose one before submitting", param="seed")
    _check_ids("prompt", submit.prompt_token_ids, limits.vocab_size)
    _check_ids("emitted_token_ids", submit.emitted_token_ids, limits.vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, limits.vocab_size)
    for word in sampling.bad_words:
        _check_ids("bad_words", word, limits.vocab_size)
    max_total = limits.max_model_len
    if sampling.max_tokens is not None:
        max_total = min(max_total, prompt_len + sampling.max_tokens)
    stops = frozenset(sampling.stop_token_ids)
    return RequestSpec(
        request_id=submit.request_id,
        prompt_len=prompt_len,
        max_total=max_total,
        stop_token_ids=stops if sampling.ignore_eos else stops | limits.eos_token_ids,
        sampling=sampling,
        order=order,
        priority=submit.priority,
        arrival_s=now,
    )


def make_export_spec(submit: Submit, limits: RequestLimits, order: int, now: float) -> RequestSpec:
    """The same for a sequence of which only KV blocks are wanted; its length has been accepted by a replica already.

    Raises:
        UserError: it does not fit this one.
    """
    num_tokens = len(submit.prompt_token_ids)
    if not 1 < num_tokens <= limits.max_model_len:
        raise UserError(f"{num_tokens} tokens; the context holds {limits.max_model_len}", param="prompt")
    _check_ids("prompt", submit.prompt_token_ids, limits.vocab_size)
    return RequestSpec(
        request_id=submit.request_id,
        prompt_len=num_tokens,
        max_total=num_tokens,
        stop_token_ids=frozenset(),
        sampling=submit.sampling,
        order=order,
        priority=submit.priority,
        arrival_s=now,
        is_export=True,
    )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise UserError(f"{name} has token id {bad}; the vocabulary's ids are 0 to {vocab_size - 1}", param=name)
