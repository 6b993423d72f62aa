"""The FastAPI application of the head: `create_app` puts the parts together. Start reading here.

A request passes `RequestFrame` (id, metrics), `KeyCheck`, then a route. A generating route reads the body (`body`,
`schemas`, `fields`), makes prompts (`prompts`) and sampling settings (`sampling`), and returns a `GenerationAnswer`,
which runs the choices (`generation`, `choice`) and sends what a writer makes of them (`chat_format`,
`completion_format`). A client that may come back gets an `AnswerReader` of a `LiveAnswer` instead.
Knows nothing of replicas: that is the gateway's side. Called by the head's main.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from cluster.answer_journal import AnswerJournal, AnswerRecord
from cluster.api.asgi import CLIENT_CLOSED, ClientGoneError, LingeringResponse
from cluster.api.errors import ApiError, to_api_error
from cluster.api.generate_routes import ChatRoute, CompletionRoute, generate_router, generate_routes
from cluster.api.info_routes import info_router, tokenize_router
from cluster.api.journal_metrics import JournalMetrics
from cluster.api.live_answer import AnswerTools, Prepared
from cluster.api.live_answers import LiveAnswers
from cluster.api.metrics import ApiMetrics
from cluster.api.middleware import KeyCheck, RequestFrame
from cluster.api.openapi import install_openapi
from cluster.api.prompts import PromptBuilder
from cluster.api.readiness import Readiness
from cluster.api.resume_routes import resume_router
from cluster.api.services import Services
from cluster.api.settings import ApiSettings
from cluster.api.tokenizers import TokenizerPool
from cluster.gateway import Gateway
from sonar.errors import UserError
from sonar.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def create_app(
    gateway: Gateway,
    settings: ApiSettings,
    *,
    registry: CollectorRegistry,
    load_tokenizer: Callable[[str], Tokenizer],
    journal: AnswerJournal | None = None,
) -> FastAPI:
    """The application, ready for any ASGI server.

    Args:
        registry: gets the API's metrics, and is what `/metrics` shows; hand in the head's own.
        load_tokenizer: reads the tokenizer at a `ServedModel.path`; called in a thread, once a path.
        journal: of answers that outlive their connection; None keeps them for as long as this process lives.
    """
    own_journal = None
    if journal is None:
        journal = own_journal = AnswerJournal()
    services, routes = _services(gateway, settings, registry, load_tokenizer, journal)
    registry.register(JournalMetrics(journal, services.answers))
    app = FastAPI(
        title="Sonar",
        version=settings.version,
        description="OpenAI-compatible serving; docs/api.md has the details.",
        lifespan=lambda _: _lifespan(services, own_journal),
        redirect_slashes=False,
    )
    for router in (generate_router(routes), resume_router(services), tokenize_router(services), info_router(services)):
        app.include_router(router)
    _answer_errors(app, settings)
    install_openapi(app, has_keys=bool(settings.api_keys))
    # The last one added is the outermost. CORS is outside the key check: a preflight request carries no key.
    app.add_middleware(KeyCheck, api_keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(RequestFrame, metrics=services.metrics)
    return app


def _services(
    gateway: Gateway,
    settings: ApiSettings,
    registry: CollectorRegistry,
    load_tokenizer: Callable[[str], Tokenizer],
    journal: AnswerJournal,
) -> tuple[Services, dict[str, ChatRoute | CompletionRoute]]:
    """The parts, and the routes that generate."""
    tokenizers = TokenizerPool(load_tokenizer, settings)
    metrics = ApiMetrics(registry)
    readiness = Readiness(gateway, tokenizers, settings)
    routes: dict[str, ChatRoute | CompletionRoute] = {}

    async def remake(record: AnswerRecord) -> Prepared:
        return await routes[record.route].remake(record)

    tools = AnswerTools(gateway, journal, tokenizers, metrics.of_model, readiness.saw_token)
    services = Services(
        gateway=gateway,
        settings=settings,
        tokenizers=tokenizers,
        prompts=PromptBuilder(tokenizers, settings),
        metrics=metrics,
        readiness=readiness,
        answers=LiveAnswers(tools, settings, remake),
    )
    routes.update(generate_routes(services))
    return services, routes


@asynccontextmanager
async def _lifespan(services: Services, own_journal: AnswerJournal | None) -> AsyncIterator[None]:
    """Load the tokenizers of the models there are while the server starts, so that no request waits for it, and go on
    with what an earlier head left open."""
    async with asyncio.TaskGroup() as group:
        warmers = [group.create_task(_warm(services, path)) for path in {m.path for m in services.gateway.models()}]
        await services.answers.begin(group)
        try:
            yield
        finally:
            services.answers.end()
            for task in warmers:
                task.cancel()
            services.tokenizers.close()
    if own_journal is not None:
        own_journal.close()


async def _warm(services: Services, path: str) -> None:
    try:
        await services.tokenizers.get(path)
    except UserError as error:
        # Not fatal: /ready names it, and each request tries again. The worker reads the same file and says it too.
        logger.warning(
            "the tokenizer at %s could not be loaded: %s", path, error, exc_info=logger.isEnabledFor(logging.DEBUG)
        )
    except Exception:
        logger.exception("the tokenizer at %s could not be loaded", path)


def _answer_errors(app: FastAPI, settings: ApiSettings) -> None:
    """Every error in OpenAI's shape, the framework's own (404, 405) too."""

    def answer(error: ApiError) -> Response:
        kind = LingeringResponse if error.code == "body_too_large" else Response
        return kind(error.body(), error.status, error.headers, "application/json")

    async def on_known_error(_: Request, error: Exception) -> Response:
        return answer(to_api_error(error, retry_after_s=settings.retry_after_s))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        place = f"{request.method} {request.url.path}"
        text = {404: f"{place}: no such route", 405: f"{place}: method not allowed"}.get(error.status_code)
        headers = dict(error.headers or {})
        return answer(ApiError(error.status_code, text or str(error.detail), code="invalid_url", headers=headers))

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    app.add_exception_handler(ApiError, on_known_error)
    app.add_exception_handler(UserError, on_known_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGoneError, on_gone)
