"""uvicorn as a part of the head: on a socket that is bound before anything heavy starts, in the head's own loop.

Leaves signals to the head. Knows no application.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn

from cluster.config import TlsFiles
from sonar.errors import ConfigError, SonarError
from sonar.transport import Address

BACKLOG = 2048
LIFESPAN_END_S = 2.0


def bind_http(host: str, port: int) -> socket.socket:
    """A listening socket; clients may connect from now on, and wait.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"http_host={host!r} is no address of this machine ({error})", param="http_host") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # At once, not when the server starts: with SO_REUSEADDR two processes can bind a port, only one can listen.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ConfigError(
            f"http_port={port} on {host} {reason}; stop what listens there, or choose another port", param="http_port"
        ) from error
    return listener


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes no signals: the head has to drain before its HTTP server ends."""
        yield


def _check_tls(tls: TlsFiles) -> None:
    """Raises `ConfigError` unless the two files belong together, which uvicorn would say in the middle of a start."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.private_key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"certificate {tls.certificate} with private_key {tls.private_key} cannot be used: {error}; give PEM files "
            "that belong together, the key without a pass phrase",
            param="certificate",
        ) from error


class HttpServer:
    """Serves an ASGI application on a listening socket.

    Raises:
        ConfigError: the certificate cannot be used.
    """

    def __init__(self, app: Any, listener: socket.socket, tls: TlsFiles | None = None) -> None:
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=5)
        if tls is not None:
            _check_tls(tls)
            config.ssl_certfile, config.ssl_keyfile = str(tls.certificate), str(tls.private_key)
        self._server = _QuietServer(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> Address:
        """What it listens on."""
        host, port = self._listener.getsockname()[:2]
        return Address(host, port)

    async def run(self) -> None:
        """Serves until `stop`.

        Raises:
            SonarError: the application did not start.
        """
        await self._server.serve([self._listener])
        if self._server.force_exit and self._server.started:
            # uvicorn leaves this out then, and the application's task behind.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.lifespan.shutdown(), LIFESPAN_END_S)
        if not self._server.started:
            raise SonarError("the HTTP application did not start; the log says why")

    def stop(self, *, now: bool = False) -> None:
        """Ends `run` once open responses are done (at most 5 s), or now."""
        self._server.should_exit = True
        self._server.force_exit |= now
