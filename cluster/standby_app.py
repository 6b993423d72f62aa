"""What a head that stands by answers over HTTP: it is well, it is not ready, and all else the head that leads says.

Knows no cluster. Requests and answers pass as they are, streams as they come; while nobody leads, and for whatever a
leader broke off before its answer began, clients get a 503 with `Retry-After`. Called by `cluster.standby`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec

from cluster.leadership import HeadAddress

logger = logging.getLogger(__name__)

FORWARDED = b"sonar-forwarded"
CONNECT_TIMEOUT_S = 2.0
RETRY_AFTER_S = 1
# Of one connection, not of the request (RFC 9110, 7.6.1); the length is the server's to count again.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host"}
)
Headers = list[tuple[bytes, bytes]]


class StandbyApp:
    """An ASGI application.

    Args:
        leader: whoever leads, as far as is known. forwards: whether requests are passed on to it.
    """

    def __init__(self, leader: Callable[[], HeadAddress | None], *, forwards: bool) -> None:
        self._leader = leader
        self._forwards = forwards
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        for kind in ("startup", "shutdown"):
            assert (await receive())["type"] == f"lifespan.{kind}"
            if kind == "shutdown":
                await self._client.aclose()
            await send({"type": f"lifespan.{kind}.complete"})

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        leader = self._leader()
        if scope["path"] == "/health":
            await _send(send, 200, {"status": "ok", "role": "standby"}, leader)
        elif scope["path"] == "/ready":
            where = leader.http if leader is not None else "nobody"
            await _send(send, 503, {"ready": False, "reasons": {"": f"this head stands by; {where} leads"}}, leader)
        elif leader is None or not self._forwards or any(name == FORWARDED for name, _ in scope["headers"]):
            await _refuse(send, leader)
        else:
            await self._forward(scope, receive, send, leader)

    async def _forward(self, scope: Any, receive: Any, send: Any, leader: HeadAddress) -> None:
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers: Headers = [pair for pair in scope["headers"] if pair[0].lower() not in _HOP_BY_HOP]
        request = self._client.build_request(
            scope["method"],
            leader.http + (scope["raw_path"] + query).decode("latin-1"),
            headers=[*headers, (FORWARDED, b"1")],
            content=_body(receive) if scope["method"] not in ("GET", "HEAD") else None,
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            logger.info("the leader at %s does not answer: %r", leader.http, error)
            await _refuse(send, leader)
            return
        try:
            told = [pair for pair in response.headers.raw if pair[0].lower() not in _HOP_BY_HOP]
            await send({"type": "http.response.start", "status": response.status_code, "headers": told})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()


async def _body(receive: Any) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise httpx.ReadError("the client is gone")
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _refuse(send: Any, leader: HeadAddress | None) -> None:
    where = f"; {leader.http} leads" if leader is not None else ": no head leads now"
    error = {
        "message": f"this head stands by{where}; try again",
        "type": "server_error",
        "param": None,
        "code": "head_stands_by",
    }
    await _send(send, 503, {"error": error}, leader)


async def _send(send: Any, status: int, body: dict[str, Any], leader: HeadAddress | None) -> None:
    headers: Headers = [(b"content-type", b"application/json")]
    if status != 200:
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    if leader is not None:
        headers.append((b"sonar-leader", leader.http.encode("latin-1")))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})
