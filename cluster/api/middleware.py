"""What wraps every request: an id, the key check, counting, and the last net under unexpected errors.

Plain ASGI, because Starlette's BaseHTTPMiddleware copies every chunk of a stream through a queue. Knows no endpoint.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.asgi import send_error
from cluster.api.errors import ApiError, to_api_error
from cluster.api.metrics import ApiMetrics

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
# Keys of the ASGI scope. DIRECT_SEND: the send below the framework's wrappers, which look at the start of a response
# only; five coroutines less a chunk, some 1.5 us of a streamed token's 20.
REQUEST_ID = "sonar.request_id"
DIRECT_SEND = "sonar.direct_send"


class RequestFrame:
    """Gives each HTTP request an id (response header `x-request-id`), counts it, answers 500 for what nobody caught."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        scope[DIRECT_SEND] = send
        status = 0

        async def framed_send(message: Message) -> None:
            nonlocal status
            if status == 0:
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        self._metrics.open_requests.inc()
        try:
            await self._app(scope, receive, framed_send)
        except Exception as error:
            logger.error("request %s failed", request_id, exc_info=error)
            if status:
                raise
            await send_error(to_api_error(error), framed_send)
        finally:
            self._metrics.open_requests.dec()
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(endpoint, str(status)).inc()


class KeyCheck:
    """Refuses requests without one of the keys, on every path but the open ones, existing or not."""

    def __init__(self, app: ASGIApp, api_keys: Iterable[str]) -> None:
        self._app = app
        # Digests have one length, so that a comparison's time tells nothing of a key's.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is required: send the header `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await send_error(error, send)

    def _is_known(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, key = values[0].partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)
