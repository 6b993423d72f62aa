"""Calls to etcd's HTTP/JSON gateway (etcd 3.4 and later): endpoints in turn, errors, user authentication.

The gateway needs no client library: one that keeps up with etcd, TLS, authentication and several endpoints is not to be
had for Python, and gRPC would be a heavy dependency for a few calls a minute. Blocking; any thread. Knows the wire, not
what is kept. Called by `cluster.store.etcd`.
"""

from __future__ import annotations

import ssl
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

import httpx
import msgspec

from cluster.store.contract import StoreUnavailableError
from cluster.store.settings import StoreConfig
from sonar.errors import ConfigError, SonarError

# One endpoint's time for one attempt: a member that lost its leader holds requests until it has one again.
ATTEMPT_S = 2.0
RETRY_PAUSE_S = 0.1
# gRPC's codes, as the gateway writes them.
_DEADLINE_EXCEEDED, _UNAVAILABLE, _UNAUTHENTICATED, _INVALID_ARGUMENT = 4, 14, 16, 3
_RETRIED_CODES = {_DEADLINE_EXCEEDED, _UNAVAILABLE}


class EtcdError(SonarError):
    """etcd refused a call, and would again."""


class Answer(NamedTuple):
    """body: of the call that succeeded. was_unsure: an earlier attempt of it may have succeeded too."""

    body: dict[str, Any]
    was_unsure: bool


class EtcdGateway:
    """Owner of the HTTP connections and of the authentication token.

    Raises:
        ConfigError: a certificate or password file cannot be read.
    """

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._current = 0
        self._token = ""
        self._lock = Lock()
        try:
            context = ssl.create_default_context(cafile=config.ca_file)
            if config.certificate is not None and config.private_key is not None:
                context.load_cert_chain(config.certificate, config.private_key)
            self._password = config.password_file.read_text().strip() if config.password_file else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"store: {error}; give files that can be read, in PEM form", param="store") from error
        # trust_env: a proxy of the environment is for the way out, not for a cluster's own store.
        self._client = httpx.Client(verify=context, timeout=ATTEMPT_S, trust_env=False)

    def close(self) -> None:
        """Ends all connections."""
        self._client.close()

    def call(self, path: str, body: Mapping[str, Any]) -> Answer:
        """One unary call, at whichever endpoint answers.

        Raises:
            StoreUnavailableError: none does within the configured time.
            EtcdError: it is refused.
        """
        deadline_s = time.monotonic() + self._config.timeout_s
        was_unsure, has_renewed, last = False, False, ""
        while time.monotonic() < deadline_s:
            endpoint = self.endpoint
            try:
                response = self._client.post(endpoint + path, json=body, headers=self.headers())
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                last = f"{endpoint}: {error or type(error).__name__}"
            except httpx.TransportError as error:
                was_unsure, last = True, f"{endpoint}: {error or type(error).__name__}"
            else:
                if response.status_code == 200:
                    return Answer(msgspec.json.decode(response.content), was_unsure)
                code, text = read_error(response.content)
                last = f"{endpoint}: {text}"
                if code == _UNAUTHENTICATED and not has_renewed and self._config.user:
                    has_renewed = True
                    self.renew_token()
                    continue
                if code not in _RETRIED_CODES and response.status_code < 502:
                    raise EtcdError(f"etcd at {endpoint} refused {path}: {text}")
                was_unsure = True
            self.move_on(endpoint)
            time.sleep(RETRY_PAUSE_S)
        raise StoreUnavailableError(
            f"no etcd endpoint answered {path} within {self._config.timeout_s:g} s; last: {last}"
        )

    def stream(self, path: str, body: Mapping[str, Any], read_timeout_s: float) -> httpx.Response:
        """Begins a call whose answer has no end; the caller closes the response. Raises `httpx.TransportError`."""
        timeout = httpx.Timeout(ATTEMPT_S, read=read_timeout_s)
        request = self._client.build_request(
            "POST", self.endpoint + path, json=body, headers=self.headers(), timeout=timeout
        )
        return self._client.send(request, stream=True)

    @property
    def endpoint(self) -> str:
        """The one in use."""
        return self._config.endpoints[self._current % len(self._config.endpoints)]

    def move_on(self, endpoint: str) -> None:
        """That endpoint did not do: another one is next, unless another thread has moved on already."""
        with self._lock:
            if endpoint == self.endpoint:
                self._current += 1

    def headers(self) -> dict[str, str]:
        """With the token, which is fetched at first use."""
        if not self._token:
            self.renew_token()
        return {"Authorization": self._token} if self._token else {}

    def renew_token(self) -> None:
        """Logs in (again), if there is a user: etcd's tokens end after 5 min without use, and with their member."""
        for _ in self._config.endpoints if self._config.user else ():
            endpoint = self.endpoint
            try:
                response = self._client.post(
                    f"{endpoint}/v3/auth/authenticate", json={"name": self._config.user, "password": self._password}
                )
            except httpx.TransportError:
                self.move_on(endpoint)
                continue
            if response.status_code == 200:
                self._token = msgspec.json.decode(response.content)["token"]
                return
            code, text = read_error(response.content)
            if code == _INVALID_ARGUMENT:
                raise EtcdError(f"etcd at {endpoint} refused the user {self._config.user!r}: {text}")
            self.move_on(endpoint)


def read_error(content: bytes) -> tuple[int, str]:
    """Code and text of a refusal. What follows the JSON (gRPC's trailers, in etcd 3.4) is not looked at."""
    text = content.decode(errors="replace")
    try:
        found = msgspec.json.decode(text[: text.rindex("}") + 1])
        return int(found.get("code", 0)), str(found.get("error") or found.get("message"))
    except (ValueError, msgspec.MsgspecError, AttributeError):
        return 0, text[:200]


def encode(text: str | bytes) -> str:
    """As the gateway takes keys and values."""
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def decode(text: str) -> bytes:
    """As it gives them; empty ones are left out of its JSON."""
    return b64decode(text)
