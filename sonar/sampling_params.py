"""How a request's tokens are drawn: one frozen struct, validated at construction, sent as it is to every rank.

Torch-free: the API builds it, the journal keeps it, the sampler reads it. Rules of each filter: the docstring of
`sonar.ops.table.SampleFn`.
"""

from __future__ import annotations

import math

import msgspec

from sonar.errors import UserError

MAX_LOGPROBS = 20
MAX_N = 64
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Per-request sampling settings; a default means "off".

    Attributes:
        seed: draw key in [0, 2^63). None lets the receiver choose one, which it then writes into the journal, so that
            below the API every request has a seed.
        max_tokens: tokens to generate at most; None means up to the context's end.
        min_tokens: end-of-sequence and stop ids are banned until this many tokens are out.
        temperature: 0 is greedy.
        top_k: keep the k most likely; 0 or -1 is off.
        repetition_penalty: over prompt and output. presence/frequency: over output only, as OpenAI defines them.
        logit_bias: token id -> added to its logit.
        stop: strings that end the output, checked by whoever detokenizes. stop_token_ids: checked by the engine.
        bad_words: token id sequences that may not be produced (the API tokenizes the words).
        logprobs: number of alternatives to report a token, None for none; 0 reports the drawn token alone.
        prompt_logprobs: the same over the prompt; such a request does not read the prefix cache.
    """

    n: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_in_output: bool = False

    def __post_init__(self) -> None:
        _check_range("n", self.n, 1, MAX_N)
        if self.seed is not None:
            _check_range("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens if self.max_tokens is not None else 2**31)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)  # samplers keep it in 32 bits
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)
        if any(not word for word in self.bad_words):
            raise UserError("bad_words contains an empty sequence; give at least one token each", param="bad_words")
        if any(not s for s in self.stop):
            raise UserError("stop contains an empty string; give non-empty strings", param="stop")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def child_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request with n > 1; sequence 0 keeps the request's own.

    A pure function, so that the HTTP API and `sonar.LLM` give the same tokens, and each sequence alone gives what it
    gives among its siblings. With z = seed + index * 0x9E3779B97F4A7C15 mod 2^64, the finalizer of splitmix64 (Steele,
    Lea, Flood 2014): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31;
    then z mod 2^63.

    Args:
        seed: in [0, 2^63). index: from 0.
    """
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) % 2**63


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise `UserError` naming field, value and range unless low <= value <= high (low < value if open_low)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"{name}={value!r} is not a finite number", param=name)
    if not (low <= value <= high) or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise UserError(f"{name}={value} is out of range; allowed is {bracket}{low}, {high}]", param=name)
