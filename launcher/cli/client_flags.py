"""What `sonar chat` and `sonar bench serve` share as clients of a server: flags, key, and which model it serves."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

from sonar.errors import SonarError, UserError

DEFAULT_URL = "http://127.0.0.1:2242"


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """--url or --port, --api-key, --model; see `server_of`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default=None, help=f"without /v1 (default: $SONAR_URL, else {DEFAULT_URL})")
    where.add_argument("--port", type=int, default=None, help="of a server on this machine, instead of --url")
    parser.add_argument("--api-key", default=None, help="default: $SONAR_API_KEY, else $OPENAI_API_KEY")
    parser.add_argument("--model", default=None, help="default: the first that the server lists")


class Server(NamedTuple):
    """Where to send requests. url: without a slash at its end. api_key: None for none."""

    url: str
    api_key: str | None


def server_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Server:
    """The server that flags and environment name."""
    local = None if args.port is None else f"http://127.0.0.1:{args.port}"
    url = args.url or local or environ.get("SONAR_URL") or DEFAULT_URL
    return Server(url.rstrip("/"), args.api_key or environ.get("SONAR_API_KEY") or environ.get("OPENAI_API_KEY"))


def auth_headers(api_key: str | None) -> dict[str, str]:
    """Headers of every request."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def resolve_model(server: Server, model: str | None) -> str:
    """The wanted model, or the first that the server lists.

    Raises:
        UserError: no server answers at the url, it refuses the key, or it serves no model.
    """
    if model is not None:
        return model
    import httpx

    url = server.url
    try:
        answer = httpx.get(f"{url}/v1/models", headers=auth_headers(server.api_key), timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"no server answers at {url} ({error}); start one with `sonar serve`, or give --url or --port"
        ) from error
    if answer.status_code == 401:
        raise UserError(f"{url} wants an API key; give --api-key or set SONAR_API_KEY")
    if answer.status_code != 200:
        raise SonarError(f"{url}/v1/models answered with status {answer.status_code}: {answer.text[:200]}")
    models = [entry["id"] for entry in answer.json().get("data", [])]
    if not models:
        raise UserError(f"{url} serves no model yet")
    return str(models[0])
