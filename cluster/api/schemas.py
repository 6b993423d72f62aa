"""Request bodies of every endpoint as msgspec structs: types and 64-bit bounds. null always means "not given".

Ranges of the sampler fields are checked by `SamplingParams`; which other names are accepted: `fields`. Knows no
tokenizer and no model. `openapi` turns these structs into the documented schemas.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

# Wider integers would overflow in float() or in str() when an error quotes them.
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# Narrower than what the head itself may use, whose probes come before everything.
Priority = Annotated[int, Meta(ge=-1_000_000, le=1_000_000)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: a last chunk with `usage`. continuous_usage_stats: `usage` in every chunk.

    include_obfuscation is OpenAI's padding of chunks; there is none here, whatever it says."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct):
    """Only the type "text" is served so far."""

    type: str


class SamplerFields(msgspec.Struct, kw_only=True):
    """What both completion endpoints share."""

    model: str
    n: Int | None = None
    best_of: Int | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: Priority | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    add_special_tokens: bool | None = None


class ChatCompletionRequest(SamplerFields, kw_only=True):
    """POST /v1/chat/completions. reasoning_effort is handed to the chat template."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class CompletionRequest(SamplerFields, kw_only=True):
    """POST /v1/completions. prompt: text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize with a prompt, or with messages and their template fields."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
