"""POST /v1/chat/completions and /v1/completions: from a body to the answer that runs it.

An answer lives as long as its connection (`answer`), unless its client may come back for it (`live_answers`).
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.answer_journal import AnswerRecord
from cluster.api.answer import GenerationAnswer
from cluster.api.answer_reader import AnswerReader
from cluster.api.body import BodyReader, read_body
from cluster.api.chat_format import ChatChunkWriter, ChatWriter
from cluster.api.choice import Choice
from cluster.api.completion_format import CompletionChunkWriter, CompletionOptions, CompletionWriter
from cluster.api.errors import invalid
from cluster.api.live_answer import Prepared
from cluster.api.middleware import REQUEST_ID
from cluster.api.openapi import body_schema
from cluster.api.prompts import Prompt, check_least, too_many_choices
from cluster.api.resume import ResumeHeaders, check_number, check_same, digest, resume_headers
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

BodyT = TypeVar("BodyT", bound=SamplerFields)


def generate_routes(services: Services) -> dict[str, ChatRoute | CompletionRoute]:
    """The two routes by their paths."""
    return {route.path: route for route in (ChatRoute(services), CompletionRoute(services))}


def generate_router(routes: Mapping[str, ChatRoute | CompletionRoute]) -> APIRouter:
    """What the application includes of them."""
    router = APIRouter(tags=["generate"])
    for path, route in routes.items():
        extra = body_schema(route.kind)
        router.add_api_route(path, route.answer_to, methods=["POST"], summary=path, openapi_extra=extra)
    return router


@dataclass(frozen=True)
class _Names:
    """What a request is called, and when it came. arrival_s: monotonic."""

    response_id: str
    created_unix_s: int
    arrival_s: float


@dataclass(frozen=True)
class _Job:
    """A request on its way: arrival, names, model."""

    head: ResponseHead
    ids: SequenceIds
    model: ServedModel
    tokenizer: Tokenizer


class _Generator(Generic[BodyT]):
    """What both routes do alike.

    Args:
        path: of the route. prefix: of response ids.
    """

    def __init__(self, services: Services, kind: type[BodyT], path: str, prefix: str) -> None:
        self.kind = kind
        self.path = path
        self._prefix = prefix
        self._services = services
        self._reader = BodyReader(kind, services.settings)

    async def answer_to(self, request: Request) -> Response:
        """Completion in OpenAI's form; `stream` gives Server-Sent Events."""
        arrival_s = time.monotonic()
        raw = await read_body(request, self._services.settings)
        headers = resume_headers(request)
        known = await self._known(headers, digest(raw))
        if known is not None:
            return known
        body = self._reader.decode(raw)
        is_kept = self._is_kept(headers, body)
        if is_kept and body.seed is None:
            body.seed = secrets.randbits(63)
        names = _Names(f"{self._prefix}-{request.scope[REQUEST_ID]}", int(time.time()), arrival_s)
        model = self._services.model(body.model)
        self._services.check_ready(model)
        prepared = await self._prepare(body, await self._job(body, model, names))
        if not is_kept:
            return self._answer(prepared)
        # Made of the same key in the meantime? Nothing is awaited from here to `start`.
        known = await self._known(headers, digest(raw)) if headers.idempotency_key else None
        if known is not None:
            return known
        record = AnswerRecord(
            answer_id=names.response_id,
            owner=headers.owner,
            key=headers.idempotency_key,
            route=self.path,
            body=msgspec.json.encode(body),
            asked=digest(raw),
            fingerprint=prepared.fingerprint,
            created_unix_s=names.created_unix_s,
            max_model_len=model.max_model_len,
            streams=bool(body.stream),
        )
        return AnswerReader(self._services.answers.start(record, prepared), 0, self._services.settings)

    async def remake(self, record: AnswerRecord) -> Prepared:
        """The choices of an answer that an earlier head began."""
        body = self._reader.decode(record.body)
        model = dataclasses.replace(self._services.model(body.model), max_model_len=record.max_model_len)
        names = _Names(record.answer_id, record.created_unix_s, time.monotonic())
        return await self._prepare(body, await self._job(body, model, names))

    async def _prepare(self, body: BodyT, job: _Job) -> Prepared:
        raise NotImplementedError

    async def _known(self, headers: ResumeHeaders, asked: bytes) -> AnswerReader | None:
        """The answer that the client has had a part of, or has asked for before."""
        answers, last = self._services.answers, headers.last_event
        if last is not None:
            answer = await answers.find(headers.owner, last.answer_id)
        elif headers.idempotency_key and (found := await answers.find_key(headers.owner, headers.idempotency_key)):
            answer = found
        else:
            return None
        check_same(answer, self.path, asked)
        number = last.number if last is not None else 0
        check_number(answer, number)
        return AnswerReader(answer, number, self._services.settings)

    def _is_kept(self, headers: ResumeHeaders, body: BodyT) -> bool:
        """Whether the answer outlives its connection."""
        if headers.is_resumable and not body.stream:
            raise invalid(
                "Sonar-Resumable is for stream=true; for a whole answer send an Idempotency-Key",
                param="Sonar-Resumable",
            )
        if headers.idempotency_key:
            return True
        default = self._services.settings.resumable_streams
        return bool(body.stream) and (default if headers.is_resumable is None else headers.is_resumable)

    async def _job(self, body: BodyT, model: ServedModel, names: _Names) -> _Job:
        """Check what both forms share and find the tokenizer.

        Raises:
            ApiError: 400, 503.
        """
        _check_common(body)
        ids = SequenceIds(names.response_id, names.arrival_s, body.priority or 0, body.cache_salt or "")
        head = ResponseHead(names.response_id, names.created_unix_s, model.name)
        return _Job(head, ids, model, await self._services.tokenizer(model))

    async def _params(
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

    def _choices(
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

    def _answer(self, prepared: Prepared) -> GenerationAnswer:
        """The response that runs the choices."""
        services = self._services
        metrics = services.metrics.of_model(prepared.model)
        return GenerationAnswer(
            services.gateway,
            prepared.choices,
            prepared.writer,
            metrics,
            services.settings,
            services.tokenizers,
            partial(services.readiness.saw_token, prepared.model),
        )


class ChatRoute(_Generator[ChatCompletionRequest]):
    """/v1/chat/completions."""

    def __init__(self, services: Services) -> None:
        super().__init__(services, ChatCompletionRequest, "/v1/chat/completions", "chatcmpl")

    async def _prepare(self, body: ChatCompletionRequest, job: _Job) -> Prepared:
        logprobs = _chat_logprobs(body)
        count = num_computed(body)
        params = await self._params(
            body,
            job,
            max_tokens=chat_max_tokens(body),
            logprobs=_engine_logprobs(body, logprobs),
            prompt_logprobs=body.prompt_logprobs,
        )
        prompt = await self._services.prompts.from_chat(
            job.tokenizer,
            body,
            partial(check_least, max_model_len=job.model.max_model_len, param="prompt"),
            add_special_tokens=bool(body.add_special_tokens),
        )
        choices = self._choices(
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
        return Prepared(choices, writer, job.model.name)


class CompletionRoute(_Generator[CompletionRequest]):
    """/v1/completions."""

    def __init__(self, services: Services) -> None:
        super().__init__(services, CompletionRequest, "/v1/completions", "cmpl")

    async def _prepare(self, body: CompletionRequest, job: _Job) -> Prepared:
        count = num_computed(body)
        echoes_logprobs = bool(body.echo) and body.logprobs is not None
        params = await self._params(
            body,
            job,
            max_tokens=completion_max_tokens(body),
            logprobs=_engine_logprobs(body, body.logprobs),
            prompt_logprobs=_most(body.prompt_logprobs, body.logprobs) if echoes_logprobs else body.prompt_logprobs,
        )
        prompts = await self._services.prompts.from_completion(
            job.tokenizer,
            body.prompt,
            partial(check_least, max_model_len=job.model.max_model_len, param="prompt"),
            add_special_tokens=body.add_special_tokens is not False,
            with_text=bool(body.echo),
        )
        skip_special_tokens = body.skip_special_tokens is not False
        choices = self._choices(
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
        return Prepared(choices, writer, job.model.name)


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
