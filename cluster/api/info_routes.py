"""Everything that generates nothing: models, tokenizing, health, readiness, metrics, version."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.body import BodyReader
from cluster.api.errors import invalid
from cluster.api.openapi import body_schema
from cluster.api.prompts import check_countable, checked_ids
from cluster.api.schemas import DetokenizeRequest, TokenizeRequest
from cluster.api.services import Services
from cluster.gateway import ServedModel

# Bytes of JSON a token id takes on average; only decides between event loop and thread.
_CHARS_PER_ID = 4


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def info_router(services: Services) -> APIRouter:
    """Routes that read the state of the service."""
    router = APIRouter(tags=["service"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """The process is up. Says nothing of models: that is /ready."""
        return _json({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        """200 when every served model gave a token within the last interval, else 503 with the reasons."""
        reasons = await services.readiness.reasons()
        if not reasons:
            return _json({"ready": True})
        retry = {"Retry-After": str(services.settings.retry_after_s)}
        return _json({"ready": False, "reasons": reasons}, 503, retry)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(services.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/version")
    async def version() -> Response:
        """The server's version."""
        return _json({"version": services.settings.version})

    @router.get("/v1/models")
    async def models() -> Response:
        """The served models in OpenAI's form."""
        return _json({"object": "list", "data": [_model_card(model) for model in services.gateway.models()]})

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """One served model."""
        return _json(_model_card(services.model(model_id)))

    return router


def _model_card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "sonar",
        "max_model_len": model.max_model_len,
        "ready": model.ready,
    }


def tokenize_router(services: Services) -> APIRouter:
    """/tokenize and /detokenize."""
    router = APIRouter(tags=["tokenize"])
    tokenize_reader = BodyReader(TokenizeRequest, services.settings)
    detokenize_reader = BodyReader(DetokenizeRequest, services.settings)

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of messages under the chat template."""
        body = await tokenize_reader.read(request)
        model = services.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("send either prompt or messages", param="prompt")
        tokenizer = await services.tokenizer(model)
        param = "messages" if body.prompt is None else "prompt"
        check = partial(check_countable, max_model_len=model.max_model_len, param=param)
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            prompt = await services.prompts.from_text(tokenizer, body.prompt, check, add_special_tokens=special)
        else:
            special = bool(body.add_special_tokens)
            prompt = await services.prompts.from_chat(tokenizer, body, check, add_special_tokens=special)
        ids = prompt.token_ids
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = await services.tokenizers.run(
                len(ids) * _CHARS_PER_ID, lambda: [tokenizer.token_to_bytes(i).decode("utf-8", "replace") for i in ids]
            )
        return _json(answer)

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await detokenize_reader.read(request)
        tokenizer = await services.tokenizer(services.model(body.model))
        ids = checked_ids(body.tokens, tokenizer.vocab_size, "tokens")
        skip = bool(body.skip_special_tokens)
        size = len(ids) * _CHARS_PER_ID
        text = await services.tokenizers.run(size, lambda: tokenizer.decode(ids, skip_special_tokens=skip))
        return _json({"prompt": text})

    return router
