"""A streamed HTTP response read as cheaply as Python allows: asyncio's protocols and httptools for HTTP/1.1.

One connection a request, so that no pool's queueing enters a measurement. The client of `sonar bench serve`; it must
cost far less than the server it measures. Bytes in, payloads out; knows nothing of JSON or of tokens.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from launcher.client.events import EventParser
from sonar.errors import ConfigError

MAX_ERROR_BODY = 4096


@dataclass(frozen=True)
class Endpoint:
    """Where requests go. headers: complete lines but for the length."""

    host: str
    port: int
    path: str
    headers: bytes
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, path: str, api_key: str | None) -> Endpoint:
        """Raises `ConfigError` when the url is not http(s)://host[:port][/prefix]."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r}: write it as http://HOST:PORT", param="url")
        headers = [f"Host: {parts.netloc}", "Content-Type: application/json", "Accept: text/event-stream"]
        headers += ["Connection: close"] + ([f"Authorization: Bearer {api_key}"] if api_key else [])
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, parts.path.rstrip("/") + path, "\r\n".join(headers).encode(), tls)


class _Response(asyncio.Protocol):
    """Feeds one response to `on_event`; `done` resolves to the error text, empty when all went well."""

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._on_event = on_event
        self._http = httptools.HttpResponseParser(self)
        self._events = EventParser()
        self._error_body = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._http.feed_data(data)
        except (httptools.HttpParserError, ValueError) as error:
            self._finish(f"bad response: {error}")

    def on_body(self, body: bytes) -> None:
        """httptools: a piece of the decoded body."""
        if self._http.get_status_code() == 200:
            for event in self._events.feed(body):
                self._on_event(event)
        elif len(self._error_body) < MAX_ERROR_BODY:
            self._error_body += body

    def on_message_complete(self) -> None:
        """httptools: the body's end."""
        status = self._http.get_status_code()
        detail = self._error_body[:200].decode(errors="replace").strip()
        self._finish("" if status == 200 else f"HTTP {status} {detail}".strip())

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"connection lost before the end: {exc or 'closed by the server'}")

    def _finish(self, error: str) -> None:
        if not self.done.done():
            self.done.set_result(error)


async def post_stream(endpoint: Endpoint, body: bytes, on_event: Callable[[bytes], None], timeout_s: float) -> str:
    """Sends one POST and hands each event's data over as it comes. Returns the error, empty when there was none."""
    head = b"POST %s HTTP/1.1\r\n%s\r\nContent-Length: %d\r\n\r\n" % (
        endpoint.path.encode(),
        endpoint.headers,
        len(body),
    )
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, response = await asyncio.get_running_loop().create_connection(
                lambda: _Response(on_event), endpoint.host, endpoint.port, ssl=endpoint.tls
            )
            transport.write(head + body)
            return await response.done
    except TimeoutError:
        return f"no end within {timeout_s:g} s"
    except OSError as error:
        return f"cannot connect: {error.strerror or error}"
    finally:
        if transport is not None:
            transport.abort()
