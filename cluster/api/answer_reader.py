"""Sends a live answer's frames to one client, from wherever that client left off. Its going away ends nothing else."""

from __future__ import annotations

import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.answer import JSON_TYPE, SSE_HEADERS
from cluster.api.asgi import CLIENT_CLOSED, ClientGoneError, SendWatch, SlowReaderError, send_error, until_disconnect
from cluster.api.errors import to_api_error
from cluster.api.live_answer import LiveAnswer
from cluster.api.middleware import DIRECT_SEND
from cluster.api.settings import ApiSettings

logger = logging.getLogger(__name__)


class AnswerReader(Response):
    """Answers one HTTP request with frames that somebody else's task makes.

    Args:
        after: number of the last frame the client has; 0 for none.
    """

    def __init__(self, answer: LiveAnswer, after: int, settings: ApiSettings) -> None:
        super().__init__()
        self._answer = answer
        self._next = after
        self._settings = settings
        self._started = False
        self._is_sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames; returns at the answer's end, or when nobody reads them here any more."""
        answer_id = self._answer.record.answer_id
        try:
            with self._answer.reading():
                await until_disconnect(receive, self._run(send, scope[DIRECT_SEND]), lambda: self._is_sent)
        except ClientGoneError:
            logger.info("%s: the client is gone after event %d, the answer goes on", answer_id, self._next)
            if not self._started:
                await send({"type": "http.response.start", "status": CLIENT_CLOSED, "headers": []})
        except SlowReaderError as error:
            logger.warning("%s: %s; the answer goes on", answer_id, error)
        except Exception as error:  # noqa: BLE001 - each fault becomes the client's answer
            # After the first byte the connection is closed without the response's end.
            logger.info("%s: %s", answer_id, error)
            if not self._started:
                await send_error(to_api_error(error, retry_after_s=self._settings.retry_after_s), send)

    async def _run(self, send: Send, direct_send: Send) -> None:
        answer = self._answer
        with SendWatch(self._settings.send_timeout_s) as watch:
            while not self._is_sent:
                await answer.news_after(self._next)
                frames = answer.frames[self._next :]
                if not frames and answer.failure is not None:
                    raise answer.failure
                self._next += len(frames)
                data = b"".join(frames)
                # One that broke off has no end here: its reader is cut off, and comes back for the rest.
                is_last = answer.is_ended and answer.failure is None
                watch.began()
                if not self._started:
                    self._started = True
                    length = (b"content-length", b"%d" % len(data))
                    headers = SSE_HEADERS if answer.record.streams else (JSON_TYPE, length)
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                self._is_sent = is_last
                await direct_send({"type": "http.response.body", "body": data, "more_body": not is_last})
                watch.ended()
