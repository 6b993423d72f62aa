"""Chat templates: Jinja programs that come with a model and write a conversation as its prompt.

They come from strangers: they run in Jinja's sandbox, see plain JSON values only, and whatever they raise is reported
as a refusal of the messages. What the environment offers (functions, block trimming, loop controls) is what templates
written for transformers expect. Called by `sonar.tokenizer.tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sonar.errors import UserError

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_TOOL_TEMPLATE = "tool_use"
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    NotImplementedError,
)
"""What a template's own operations can raise on messages it was not written for."""


class ChatTemplates:
    """A model's templates: owner of their compiled forms.

    Args:
        sources: name -> template; "default", and "tool_use" for conversations with tools where a model has one. Empty
            for a model without any.
        model: its name, for errors. now: local time, for templates that write the date.
    """

    def __init__(self, sources: Mapping[str, str], model: str, now: Callable[[], datetime] = datetime.now) -> None:
        self.sources = dict(sources)
        self._model = model
        self._environment = _make_environment(now)
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        chat_template: str | None = None,
    ) -> str:
        """The prompt.

        Args:
            variables: what else the template sees: special tokens and the request's own.
            chat_template: used instead of the model's.

        Raises:
            UserError: no template, a reserved variable, or the template refused; with its reason.
        """
        for name in _RESERVED:
            if name in variables:
                raise UserError(f"template variable {name!r} is reserved; use another name", param="template_kwargs")
        template = self._find(tools, chat_template)
        # A null (OpenAI's clients send content=null beside tool calls) is to templates what an absent key is;
        # most would write "None".
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return template.render(
                messages=chat,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except _REFUSALS as error:
            raise UserError(
                f"the chat template of {self._model} does not accept these messages: {error}; check their roles, order "
                "and content",
                param="messages",
                code="chat_template_refused",
            ) from error

    def _find(self, tools: Sequence[Mapping[str, Any]] | None, chat_template: str | None) -> jinja2.Template:
        if chat_template is not None:
            return self._compile(chat_template, "chat_template")
        name = _TOOL_TEMPLATE if tools and _TOOL_TEMPLATE in self.sources else "default"
        if name not in self.sources:
            raise UserError(
                f"model {self._model} has no chat template: it is no chat model, or its files lack it; use the "
                "completions endpoint, or give chat_template",
                param="messages",
                code="no_chat_template",
            )
        if name not in self._compiled:
            self._compiled[name] = self._compile(self.sources[name], "model")
        return self._compiled[name]

    def _compile(self, source: str, param: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"chat template of {self._model} is no valid Jinja: {error}", param=param) from error


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what training learns from; for a prompt it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _make_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
