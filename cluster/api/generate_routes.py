"""POST /v1/chat/completions and /v1/completions: from a body to the answer that runs it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request

from cluster.api.answer import GenerationAnswer
from cluster.api.body import BodyReader
from cluster.api.chat_format import ChatChunkWriter, ChatWriter
from cluster.api.choice import Choice
from cluster.api.completion_format import CompletionChunkWriter, CompletionOptions, CompletionWriter
from cluster.api.errors import invalid
from cluster.api.middleware import REQUEST_ID
from cluster.api.openapi import body_schema
from cluster.api.prompts import Prompt, too_many_choices
from cluster.api.sampling import (
    SequenceIds,
    chat_max_tokens,
    completion_max_tokens,
    num_computed,
    sampling_params,
    sequences,
)
from cluster.api.schemas import ChatCompletionRequest, CompletionRequest, SamplerFields, StreamOptions
from cluster.api.services import Services
from cluster.api.writers import ResponseHead, Writer
from cluster.gateway import ServedModel
from sonar.sampling_params import MAX_LOGPROBS, SamplingParams
from sonar.tokenizer import OutputText, Tokenizer


def generate_router(services: Services) -> APIRouter:
    """The two routes."""
    router = APIRouter(tags=["generate"])
    chat = ChatRoute(services)
    completion = CompletionRoute(services)
    for path, route, kind in (
        ("/v1/chat/completions", chat.answer_to, ChatCompletionRequest),
        ("/v1/completions", completion.answer_to, CompletionRequest),
    ):
        router.add_api_route(path, route, methods=["POST"], summary=path, openapi_extra=body_schema(kind))
    return router


@dataclass(frozen=True)
class _Job:
    """A request on its way: arrival, names, model."""

    head: ResponseHead
    ids: SequenceIds
    model: ServedModel
    tokenizer: Tokenizer


class _Generator:
    """What both routes do alike."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def job(self, request: Request, body: SamplerFields, prefix: str, arrival_s: float) -> _Job:
        """Check what both forms share and find the model.

        Raises:
            ApiError: 400, 404, 503.
        """
        _check_common(body)
        model = self._services.model(body.model)
        self._services.check_ready(model)
        response_id = f"{prefix}-{request.scope[REQUEST_ID]}"
        ids = SequenceIds(response_id, arrival_s, body.priority or 0, body.cache_salt or "")
        head = ResponseHead(response_id, int(time.time()), model.name)
        return _Job(head, ids, model, await self._services.tokenizer(model))

    async def params(
        self,
        body: SamplerFields,
        job: _Job,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """The sampling settings; `bad_words` need the tokenizer, so many of them go to its threads."""
        work = partial(
            sampling_params,
            body,
            job.tokenizer,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return await self._services.tokenizers.run(sum(map(len, body.bad_words or ())), work)

    def choices(
        self,
        job: _Job,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        count: int,
        skip_special_tokens: bool,
        after_text: bool,
    ) -> list[Choice]:
        """All sequences of a request: `count` for each prompt, prompts in order. after_text: whether output continues
        a text, and so may begin with a space."""
        limit = self._services.settings.max_choices
        if len(prompts) * count > limit:
            raise too_many_choices(len(prompts) * count, limit, "prompt")
        choices: list[Choice] = []
        for prompt_index, prompt in enumerate(prompts):
            for generate in sequences(prompt, params, count, job.model, job.ids, len(choices)):
                text = OutputText(job.tokenizer, generate.sampling, skip_special_tokens, after_text)
                choices.append(Choice(generate, text, index=len(choices), prompt_index=prompt_index))
        return choices

    def answer(self, job: _Job, choices: Sequence[Choice], writer: Writer) -> GenerationAnswer:
        """The response that runs the choices."""
        services = self._services
        name = job.model.name

        def on_token() -> None:
            services.readiness.saw_token(name)

        metrics = services.metrics.of_model(name)
        return GenerationAnswer(
            services.gateway, choices, writer, metrics, services.settings, services.tokenizers, on_token
        )


class ChatRoute(_Generator):
    """/v1/chat/completions."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._reader = BodyReader(ChatCompletionRequest, services.settings)

    async def answer_to(self, request: Request) -> GenerationAnswer:
        """Chat completion in OpenAI's form; `stream` gives Server-Sent Events."""
        arrival_s = time.monotonic()
        body = await self._reader.read(request)
        job = await self.job(request, body, "chatcmpl", arrival_s)
        logprobs = _chat_logprobs(body)
        count = num_computed(body)
        params = await self.params(
            body,
            job,
            max_tokens=chat_max_tokens(body),
            logprobs=_engine_logprobs(body, logprobs),
            prompt_logprobs=body.prompt_logprobs,
        )
        prompt = await self._services.prompts.from_chat(
            job.tokenizer, body, add_special_tokens=bool(body.add_special_tokens)
        )
        choices = self.choices(
            job,
            [prompt],
            params,
            count=count,
            skip_special_tokens=body.skip_special_tokens is not False,
            after_text=bool(body.continue_final_message),
        )
        writer: Writer
        if body.stream:
            options = body.stream_options or StreamOptions()
            writer = ChatChunkWriter(job.head, job.tokenizer, choices, options=options, top_logprobs=logprobs)
        else:
            writer = ChatWriter(job.head, job.tokenizer, choices, num_shown=params.n, top_logprobs=logprobs)
        return self.answer(job, choices, writer)


class CompletionRoute(_Generator):
    """/v1/completions."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._reader = BodyReader(CompletionRequest, services.settings)

    async def answer_to(self, request: Request) -> GenerationAnswer:
        """Text completion in OpenAI's form; `stream` gives Server-Sent Events."""
        arrival_s = time.monotonic()
        body = await self._reader.read(request)
        job = await self.job(request, body, "cmpl", arrival_s)
        count = num_computed(body)
        echoes_logprobs = bool(body.echo) and body.logprobs is not None
        params = await self.params(
            body,
            job,
            max_tokens=completion_max_tokens(body),
            logprobs=_engine_logprobs(body, body.logprobs),
            prompt_logprobs=_most(body.prompt_logprobs, body.logprobs) if echoes_logprobs else body.prompt_logprobs,
        )
        prompts = await self._services.prompts.from_completion(
            job.tokenizer,
            body.prompt,
            add_special_tokens=body.add_special_tokens is not False,
            with_text=bool(body.echo),
        )
        skip_special_tokens = body.skip_special_tokens is not False
        choices = self.choices(
            job, prompts, params, count=count, skip_special_tokens=skip_special_tokens, after_text=True
        )
        options = CompletionOptions(
            num_shown=params.n,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs is not None,
            echo=tuple(prompt.text or "" for prompt in prompts) if body.echo else (),
            drop_output=body.max_tokens == 0,
            skip_special_tokens=skip_special_tokens,
        )
        writer: Writer
        if body.stream:
            stream_options = body.stream_options or StreamOptions()
            writer = CompletionChunkWriter(job.head, job.tokenizer, choices, options, stream_options)
        else:
            writer = CompletionWriter(job.head, job.tokenizer, choices, options)
        return self.answer(job, choices, writer)


def _check_common(body: SamplerFields) -> None:
    """Refuse combinations that both forms refuse."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream=true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs cannot be streamed; send stream=false", param="prompt_logprobs")
    if body.response_format is not None and body.response_format.type != "text":
        raise invalid(
            f'response_format of type {body.response_format.type[:100]!r} is not supported yet; only "text" is',
            param="response_format",
            code="unsupported_parameter",
        )


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    """Alternatives a token, None when no logprobs were asked for."""
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs needs logprobs=true", param="top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise invalid(f"top_logprobs={body.top_logprobs}; must be 0 to {MAX_LOGPROBS}", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _engine_logprobs(body: SamplerFields, shown: int | None) -> int | None:
    """What the engine must report: best_of ranks by logprobs even when none are shown."""
    return 0 if shown is None and body.best_of is not None else shown


def _most(*counts: int | None) -> int:
    return max(count for count in counts if count is not None)
