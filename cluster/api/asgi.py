"""Small ASGI pieces: sending an error, noticing that a client went away, noticing one that does not read.

Knows nothing of models or of OpenAI's shapes but the error body.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.errors import ApiError

R = TypeVar("R")

# What nginx logs when the client closed first; never reaches anyone, but counts in the metrics.
CLIENT_CLOSED = 499

# How long, and for how many bytes, a client that was refused may go on sending before the connection is closed on it.
LINGER_S = 2.0
LINGER_BYTES = 64 * 1024 * 1024


class ClientGoneError(Exception):
    """The client closed its connection; nobody is there to answer."""


class SlowReaderError(Exception):
    """The client has read nothing for a long time and its buffers are full."""


class LingeringResponse(Response):
    """An answer to a client that may still be sending its body: it is sent at once, what comes is thrown away.

    A connection that is closed on unread bytes is reset, and with it the answer may be lost.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await _discard(receive, LINGER_BYTES)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive, most: int) -> None:
    """Reads a body to its end, or `most` bytes of it."""
    more = True
    while more and most > 0:
        message = await receive()
        most -= len(message.get("body", b""))
        more = message.get("more_body", False)


async def send_error(error: ApiError, send: Send) -> None:
    """Send an error as the whole response."""
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, R], is_answered: Callable[[], bool]) -> R:
    """Run `work`, cancelled when the client goes away before `is_answered`; the request's body must have been read.

    Both tasks are over when this returns. Not a TaskGroup: it would wrap the error of `work`.

    Raises:
        ClientGoneError: the client went away. Otherwise whatever `work` raises.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not is_answered():
            raise ClientGoneError("the client closed its connection")
        return await task
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.wait((task, watch))
        for done in (task, watch):
            if not done.cancelled():
                done.exception()  # seen: else asyncio logs it as never retrieved


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class SendWatch:
    """Cancels the task that entered it when one `send` lasts too long, as `SlowReaderError`.

    A timer of its own looks now and then, because a time-out around each send would cost more than the send.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: float | None = None
        self._fired = False

    def __enter__(self) -> SendWatch:
        task = asyncio.current_task()
        assert task is not None, "entered outside a task"
        self._task = task
        self._rearm()
        return self

    def began(self) -> None:
        """A send begins."""
        self._since = time.monotonic()

    def ended(self) -> None:
        """The send is through."""
        self._since = None

    def _rearm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s / 4, self._look)

    def _look(self) -> None:
        if self._since is not None and time.monotonic() - self._since >= self._timeout_s:
            self._fired = True
            self._task.cancel()
        else:
            self._rearm()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._fired and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            raise SlowReaderError(f"the client read nothing for {self._timeout_s:g} s") from None
