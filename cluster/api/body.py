"""Request bodies: read with a limit and a deadline, decoded into a struct, every fault a clear 400, 408 or 413.

Knows no endpoint. Called by the routes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from cluster.api.asgi import ClientGoneError
from cluster.api.errors import ApiError, invalid
from cluster.api.fields import check_fields
from cluster.api.settings import ApiSettings

T = TypeVar("T", bound=msgspec.Struct)


class BodyReader(Generic[T]):
    """Reads the body of one endpoint into its struct; a field that would have no effect is refused by name."""

    def __init__(self, kind: type[T], settings: ApiSettings) -> None:
        self.served = frozenset(field.encode_name for field in msgspec.structs.fields(kind))
        self._settings = settings
        self._names = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._decoder = msgspec.json.Decoder(kind)

    async def read(self, request: Request) -> T:
        """Read and decode.

        Raises:
            ApiError: 400, 408, 413 or 415, with the field at fault.
            ClientGoneError: the connection closed before the body's end.
        """
        return self.decode(await read_body(request, self._settings))

    def decode(self, body: bytes) -> T:
        """Decode JSON.

        Raises:
            ApiError: 400 that says what is wrong and in which field.
        """
        limit = self._settings.max_json_depth
        try:
            # Names first, values unread: unknown ones are refused before a hostile value is built.
            check_fields(self._names.decode(body), self.served, self._settings.ignored_fields)
            value = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong_type(str(error)) from None
        except msgspec.DecodeError as error:
            raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
        except RecursionError:
            raise _too_deep(limit) from None
        check_depth([getattr(value, name) for name in self.served], limit + 1)
        return value


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """All bytes of the body, at most `max_body_bytes`, within `body_timeout_s`."""
    limit = settings.max_body_bytes
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(
            415, "Content-Encoding is not supported; send the body uncompressed", code="unsupported_encoding"
        )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await _receive_body(request.receive, limit)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {settings.body_timeout_s:g} s",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None


async def _receive_body(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the request body exceeds {limit} bytes; send less, or raise max_body_bytes on the server",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _wrong_type(text: str) -> ApiError:
    """`Expected `int`, got `str` - at `$.messages[0].x`` becomes a message with its param."""
    missing = re.search(r"missing required field `([^`]+)`", text)
    where = re.search(r" - at `\$\.?([^`]*)`$", text)
    param = where.group(1) if where else None
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return invalid(f"{param} is required", param=param, code="missing_required_parameter")
    message = text[: where.start()] if where else text
    return invalid(f"{param or 'the body'}: {message}", param=param, code="invalid_type")


def check_depth(value: Any, limit: int) -> None:
    """Raise a 400 if lists and objects nest deeper than `limit`; templates recurse over them."""
    boxes = [value] if isinstance(value, list | dict) else []
    for _ in range(limit):
        boxes = [item for box in boxes for item in _values(box) if isinstance(item, list | dict)]
        if not boxes:
            return
    raise _too_deep(limit)


def _values(box: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return box.values() if isinstance(box, dict) else box


def _too_deep(limit: int) -> ApiError:
    return invalid(f"the body nests lists or objects more than {limit} deep; flatten it", code="nesting_too_deep")
