"""From request fields to prompt token ids: messages and their template, texts, token ids; all checks on the way.

Knows no sampling and no HTTP. Called by the routes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cluster.api.errors import ApiError, invalid
from cluster.api.schemas import ChatCompletionRequest, TokenizeRequest
from cluster.api.settings import ApiSettings
from cluster.api.tokenizers import TokenizerPool
from sonar.tokenizer import Tokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# Arguments of the template call itself; as template variables they would be ambiguous.
_RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")


# A text up to this long is tokenized in some 0.1 s even when it cannot fit, so that its error has the exact number.
EXACT_CHARS = 65_536
# /tokenize counts longer texts than the model takes, so that a client can see by how much; but not of any length.
COUNTABLE_CONTEXTS = 8


@dataclass(frozen=True)
class Prompt:
    """text: what was tokenized, or what token ids say when it was asked for."""

    token_ids: list[int]
    text: str | None = None


# The requests that carry a conversation.
ChatInput = ChatCompletionRequest | TokenizeRequest

# Is given the tokens that a text has at least, before it is tokenized; raises when they are too many.
SizeCheck = Callable[[int], None]


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and make each content a text, or null beside tool calls.

    Text parts are joined by newlines; the role "developer" becomes "system".

    Other keys (name, tool_calls, reasoning_content, ...) reach the template as they are.

    Raises:
        ApiError: 400 that names the message and the field.
    """
    if not messages:
        raise invalid("messages is empty; send at least one", param="messages")
    normal = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = message.get("role")
        if role not in _ROLES:
            raise invalid(f"{where}.role is {role!r}; known are {', '.join(_ROLES)}", param=f"{where}.role")
        content = _content_text(message.get("content"), f"{where}.content")
        if content is None and (role != "assistant" or not (message.get("tool_calls") or message.get("refusal"))):
            raise invalid(f"{where}.content is required", param=f"{where}.content", code="missing_required_parameter")
        normal.append({**message, "role": "system" if role == "developer" else role, "content": content})
    return normal


def _content_text(content: object, where: str) -> str | None:
    """The text of a message's content."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} must be text or a list of parts", param=where, code="invalid_type")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise invalid(
                f"{where}[{number}] is of type {kind!r}; only text parts are supported (no images, audio or files)",
                param=f"{where}[{number}]",
                code="unsupported_content",
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise invalid(f"{where}[{number}].{kind} must be a text", param=f"{where}[{number}].{kind}")
        texts.append(text)
    return "\n".join(texts)


def _render_open(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """The prompt up to the end of the last message's content, so that the model goes on with that message.

    Where the content ends is found by a mark appended to it: a template may trim it or write it twice.
    """
    mark = f"\ue000{uuid.uuid4().hex}\ue000"
    last = messages[-1]
    text = render([*messages[:-1], {**last, "content": (last["content"] or "") + mark}])
    at = text.find(mark)
    if at < 0:
        raise invalid(
            "the chat template does not write the last message's content as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:at]


class PromptBuilder:
    """Makes prompts of one server's requests."""

    def __init__(self, pool: TokenizerPool, settings: ApiSettings) -> None:
        self._pool = pool
        self._settings = settings

    async def from_chat(
        self, tokenizer: Tokenizer, request: ChatInput, check: SizeCheck, *, add_special_tokens: bool = False
    ) -> Prompt:
        """Render and tokenize a conversation. add_special_tokens: off, for templates write their own.

        Raises:
            ApiError, UserError: the messages or the template are at fault.
        """
        messages = normalize_messages(request.messages or [])
        continues = bool(request.continue_final_message)
        add_generation_prompt = request.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not continues
        if continues and add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                param="continue_final_message",
            )
        if continues and messages[-1]["role"] != "assistant":
            raise invalid(
                f"continue_final_message needs a last message of role assistant, not {messages[-1]['role']}",
                param="continue_final_message",
            )
        variables = self._variables(request)

        def work() -> Prompt:
            render = partial(
                tokenizer.apply_chat_template,
                add_generation_prompt=add_generation_prompt,
                template_kwargs=variables,
                chat_template=request.chat_template,
            )
            text = _render_open(render, messages) if continues else render(messages)
            return self._tokenized(tokenizer, text, check, add_special_tokens)

        # A template of the client's own may run for long whatever the messages' size.
        is_trusted = request.chat_template is None
        return await self._pool.run(len(msgspec.json.encode([messages, variables])) if is_trusted else 2**31, work)

    def _variables(self, request: ChatInput) -> dict[str, Any]:
        if request.chat_template is not None and not self._settings.trust_request_chat_template:
            raise invalid(
                "chat_template in a request is not allowed here; trust_request_chat_template on the server allows it",
                param="chat_template",
                code="unsupported_parameter",
            )
        variables = dict(request.chat_template_kwargs or {})
        for name in variables:
            if name in _RESERVED_VARIABLES or not name.isidentifier():
                raise invalid(f"chat_template_kwargs: {name[:100]!r} is not allowed", param="chat_template_kwargs")
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
        return variables

    async def from_text(self, tokenizer: Tokenizer, text: str, check: SizeCheck, *, add_special_tokens: bool) -> Prompt:
        """Tokenize a text."""
        return await self._pool.run(len(text), lambda: self._tokenized(tokenizer, text, check, add_special_tokens))

    def _tokenized(self, tokenizer: Tokenizer, text: str, check: SizeCheck, add_special_tokens: bool) -> Prompt:
        """Tokenize a text, unless it is long and cannot pass: megabytes would keep a thread for a minute."""
        if len(text) > EXACT_CHARS:
            check(tokenizer.length_bound.least(text))
        return Prompt(tokenizer.encode(text, add_special_tokens=add_special_tokens), text)

    async def from_completion(
        self,
        tokenizer: Tokenizer,
        prompt: str | list[Any],
        check: SizeCheck,
        *,
        add_special_tokens: bool,
        with_text: bool,
    ) -> list[Prompt]:
        """The prompts of a completion request: a text, texts, token ids, or lists of token ids.

        Args:
            with_text: decode token ids too, for `echo`.

        Raises:
            ApiError: kinds are mixed, a prompt is empty, an id is outside the vocabulary.
        """
        items = [prompt] if isinstance(prompt, str) else prompt
        kinds = {type(item) for item in items}
        if kinds == {int}:
            items, kinds = [items], {list}
        if len(items) > self._settings.max_choices:
            raise too_many_choices(len(items), self._settings.max_choices, "prompt")
        if kinds == {list}:
            for number, ids in enumerate(items):
                checked_ids(ids, tokenizer.vocab_size, f"prompt[{number}]")
        elif kinds != {str}:
            mixed = "mixes texts, token ids and lists" if kinds else "is empty"
            raise invalid(f"prompt {mixed}; send a text, texts, token ids or lists of token ids", param="prompt")

        def made(item: Any) -> Prompt:
            if isinstance(item, str):
                return self._tokenized(tokenizer, item, check, add_special_tokens)
            return Prompt(item, tokenizer.decode(item, skip_special_tokens=False) if with_text else None)

        return await self._pool.run(sum(map(len, items)), lambda: [made(item) for item in items])


def checked_ids(token_ids: list[int], vocab_size: int, param: str) -> list[int]:
    """The ids themselves, when every one is in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        bad = next(token_id for token_id in token_ids if token_id >= vocab_size)
        raise invalid(f"{param}: token id {bad} is outside the vocabulary of {vocab_size}", param=param)
    return token_ids


def check_length(prompt: Prompt, max_model_len: int, param: str) -> None:
    """Raise a 400 unless the prompt is not empty and leaves room for one token."""
    size = len(prompt.token_ids)
    if size == 0:
        raise invalid(f"{param} has no tokens; send some text", param=param)
    if size >= max_model_len:
        raise _too_long(f"{size} tokens", max_model_len, param)


def check_least(least: int, max_model_len: int, param: str) -> None:
    """Raise a 400 when a prompt of so many tokens or more leaves no room for one."""
    if least >= max_model_len:
        raise _too_long(f"at least {least} tokens", max_model_len, param)


def check_countable(least: int, max_model_len: int, param: str) -> None:
    """Raise a 400 when a text that is only tokenized has so many tokens that this would take long."""
    most = COUNTABLE_CONTEXTS * max_model_len
    if least > most:
        raise ApiError(
            400,
            f"{param} has at least {least} tokens; /tokenize takes {most} at most ({COUNTABLE_CONTEXTS} times the "
            "model's context): send it in parts",
            param=param,
            code="context_length_exceeded",
        )


def _too_long(size: str, max_model_len: int, param: str) -> ApiError:
    return ApiError(
        400,
        f"the prompt has {size}, but this server's context of {max_model_len} tokens must hold the prompt and "
        f"at least one output token; shorten the prompt to {max_model_len - 1} tokens or fewer",
        param=param,
        code="context_length_exceeded",
    )


def too_many_choices(count: int, limit: int, param: str) -> ApiError:
    """The refusal of a request that would start too many sequences."""
    return invalid(f"the request asks for {count} sequences; at most {limit} are allowed", param=param)
