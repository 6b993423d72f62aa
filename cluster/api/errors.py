"""Errors as clients see them: OpenAI's body, the right status. Knows nothing of routes.

`to_api_error` is the one place where an exception becomes a status; what it does not know becomes a 500 that says
nothing of the inside.
"""

from __future__ import annotations

import msgspec

from sonar.errors import CapacityError, UserError

# Longest text of an error: it may quote a client's value, which may be megabytes long.
MAX_MESSAGE_CHARS = 2000

_STATUS_BY_CODE = {"model_not_found": 404, "model_not_ready": 503, "server_stopping": 503, "kv_cache_too_small": 400}


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        status: HTTP status.
        message: what is wrong and how to mend it.
        param: the request field at fault, if one is.
        code: a stable identifier in snake case.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[:MAX_MESSAGE_CHARS] + "..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def error_type(self) -> str:
        """OpenAI's `error.type`."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> bytes:
        """OpenAI's error object as JSON."""
        error = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: BaseException, *, retry_after_s: int = 1) -> ApiError:
    """Map any exception to what the client is told."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, UserError):
        return ApiError(500, "internal error; the server's log has the details", code="internal_error")
    is_capacity = isinstance(error, CapacityError)
    status = _STATUS_BY_CODE.get(error.code, 429 if is_capacity else 400)
    code = "queue_full" if is_capacity and error.code == "invalid_value" else error.code
    headers = {"Retry-After": str(retry_after_s)} if status in (429, 503) else None
    return ApiError(status, error.message, param=error.param, code=code, headers=headers)
