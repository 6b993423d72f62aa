"""What request headers say of resuming: an answer's name, where a client left off, whether it may come back.

Pure. Called by the generating routes and by `resume_routes`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import Request

from cluster.api.errors import ApiError, invalid
from cluster.api.live_answer import LiveAnswer

MAX_KEY_CHARS = 255
# More than any answer has; a longer number would be no number of ours.
MAX_NUMBER_DIGITS = 12


class LastEvent(NamedTuple):
    """The last event a client has: the answer's id, the event's number."""

    answer_id: str
    number: int


@dataclass(frozen=True)
class ResumeHeaders:
    """The headers, checked.

    Attributes:
        owner: digest of the key the request came with.
        is_resumable: what the client wants; None when it does not say.
    """

    owner: str
    idempotency_key: str
    last_event: LastEvent | None
    is_resumable: bool | None


def resume_headers(request: Request) -> ResumeHeaders:
    """Reads them.

    Raises:
        ApiError: 400 that names the header.
    """
    headers = request.headers
    key = headers.get("idempotency-key", "")
    if len(key) > MAX_KEY_CHARS:
        raise invalid(f"Idempotency-Key has {len(key)} characters; at most {MAX_KEY_CHARS}", param="Idempotency-Key")
    last = headers.get("last-event-id", "")
    wish = headers.get("sonar-resumable")
    flags = {"true": True, "1": True, "false": False, "0": False}
    if wish is not None and wish.lower() not in flags:
        raise invalid(f"Sonar-Resumable is {wish[:100]!r}; send true or false", param="Sonar-Resumable")
    return ResumeHeaders(
        owner=hashlib.blake2b(headers.get("authorization", "").encode(), digest_size=16).hexdigest(),
        idempotency_key=key,
        last_event=last_event(last) if last else None,
        is_resumable=None if wish is None else flags[wish.lower()],
    )


def last_event(text: str) -> LastEvent:
    """Takes an event's id apart.

    Raises:
        ApiError: 400, it is none of ours.
    """
    answer_id, _, number = text.rpartition(":")
    if not answer_id or not _is_number(number):
        raise invalid(
            f"Last-Event-ID is {text[:200]!r}; send an event's id as it came, <stream id>:<number>",
            param="Last-Event-ID",
        )
    return LastEvent(answer_id, int(number))


def event_number(text: str) -> int:
    """The query's `after`.

    Raises:
        ApiError: 400, it is no number.
    """
    if not _is_number(text):
        raise invalid(f"after={text[:100]!r}; send the number of the last event you have, 0 for none", param="after")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_NUMBER_DIGITS


def check_number(answer: LiveAnswer, number: int) -> None:
    """Raises a 400 for a number that the answer will never have had."""
    if answer.is_ended and number > len(answer.frames):
        raise invalid(f"the stream has {len(answer.frames)} events, none has the number {number}", param="after")


def check_same(answer: LiveAnswer, route: str, asked: bytes) -> None:
    """Raises a 422 unless a request is the one that the answer was begun for."""
    if (answer.record.route, answer.record.asked) != (route, asked):
        raise ApiError(
            422,
            "this Idempotency-Key or Last-Event-ID belongs to another request; send the same body to the same route, "
            "or use another key",
            param="Idempotency-Key",
            code="different_request",
        )


def digest(body: bytes) -> bytes:
    """By which two bodies are compared."""
    return hashlib.blake2b(body, digest_size=16).digest()
