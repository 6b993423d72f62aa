"""The answer of a generating request as an ASGI application: runs the choices, sends what the writer makes of them.

Streaming or not differs only in the writer. Until the first byte an error has its own status; after it, it becomes an
SSE error event and the stream ends without its end mark. A client that goes away, or that reads nothing for too long,
ends the work. Knows no request fields.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.asgi import CLIENT_CLOSED, ClientGoneError, SendWatch, SlowReaderError, send_error, until_disconnect
from cluster.api.batch_writer import BatchWriter
from cluster.api.choice import Choice
from cluster.api.errors import to_api_error
from cluster.api.generation import run_choices
from cluster.api.metrics import GenerationMetrics
from cluster.api.middleware import DIRECT_SEND
from cluster.api.settings import ApiSettings
from cluster.api.tokenizers import TokenizerPool
from cluster.api.writers import Writer
from cluster.gateway import Gateway

logger = logging.getLogger(__name__)

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
)
JSON_TYPE = (b"content-type", b"application/json")


class GenerationAnswer(Response):
    """Answers one HTTP request with the output of its choices. A `Response` so that a FastAPI route may return it.

    Args:
        choices: at least one; run when the answer is called.
        tokenizers: lends its threads for what takes long to write down.
        on_token: called whenever pieces come, for `/ready` to know that the model works.
    """

    def __init__(
        self,
        gateway: Gateway,
        choices: Sequence[Choice],
        writer: Writer,
        metrics: GenerationMetrics,
        settings: ApiSettings,
        tokenizers: TokenizerPool,
        on_token: Callable[[], None],
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._choices = choices
        self._writer = BatchWriter(choices, writer, tokenizers)
        self._metrics = metrics
        self._settings = settings
        self._on_token = on_token
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; returns when it is sent or nobody reads it any more."""
        request_id = self._choices[0].request.request_id
        try:
            await until_disconnect(receive, self._run(send, scope[DIRECT_SEND]), lambda: self._writer.num_open == 0)
        except ClientGoneError:
            logger.info("%s: the client is gone, its work is aborted", request_id)
            if not self._started:
                await send({"type": "http.response.start", "status": CLIENT_CLOSED, "headers": []})
        except SlowReaderError as error:
            # Returning without an end makes the server close the connection.
            logger.warning("%s: %s; its work is aborted", request_id, error)
        except Exception as error:  # noqa: BLE001 - each fault becomes the client's answer; unknown ones are logged
            await self._send_error(error, send)

    async def _run(self, send: Send, direct_send: Send) -> None:
        with SendWatch(self._settings.send_timeout_s) as watch:
            async with aclosing(run_choices(self._gateway, self._choices, self._metrics)) as batches:
                async for batch in batches:
                    self._on_token()
                    data = await self._writer.write(batch, is_first=not self._started)
                    if data:
                        watch.began()
                        if not self._started:
                            await self._start(data, send)
                        await direct_send(
                            {"type": "http.response.body", "body": data, "more_body": self._writer.num_open > 0}
                        )
                        watch.ended()

    async def _start(self, data: bytes, send: Send) -> None:
        """Send the head of a response whose first or only bytes are `data`."""
        self._started = True
        headers = SSE_HEADERS if self._writer.streams else (JSON_TYPE, (b"content-length", b"%d" % len(data)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_error(self, error: Exception, send: Send) -> None:
        told = to_api_error(error, retry_after_s=self._settings.retry_after_s)
        if told.status >= 500:
            logger.error("%s failed", self._choices[0].request.request_id, exc_info=error)
        if not self._started:
            await send_error(told, send)
        elif self._writer.num_open > 0:
            body = b"data: " + told.body() + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": False})
