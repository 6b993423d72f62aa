"""Server-sent events and the fields of an OpenAI stream that a client here needs. Bytes in, structs out; no socket."""

from __future__ import annotations

import msgspec

MAX_EVENT_BYTES = 16 * 2**20
DONE = b"[DONE]"


class EventParser:
    """Splits a byte stream into the data of its events, wherever the network cut it.

    Source: the WHATWG HTML standard's "server-sent events", without `retry` and with CR-only lines left out.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Data of the events that these bytes complete, in order.

        Raises:
            ValueError: one event exceeds MAX_EVENT_BYTES.
        """
        *lines, self._tail = (self._tail + received).split(b"\n")
        if len(self._tail) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


class Delta(msgspec.Struct):
    """New text of a chat choice."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """One choice's part of an event: `text` in completions, `delta` in chat."""

    text: str | None = None
    delta: Delta | None = None

    @property
    def visible(self) -> str:
        """The text of the answer itself that this event brings."""
        return self.text or (self.delta.content if self.delta else None) or ""

    @property
    def has_text(self) -> bool:
        """Whether it brings any text, reasoning included."""
        return bool(self.visible or (self.delta and self.delta.reasoning_content))


class CachedTokens(msgspec.Struct):
    """Detail of the prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts, in the last event when `stream_options.include_usage` was asked for."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class ErrorBody(msgspec.Struct):
    """What went wrong, in the server's words."""

    message: str = "unknown error"


class StreamEvent(msgspec.Struct):
    """One event's data; fields not named here are skipped by the decoder. An error answer's body decodes as well."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None


def decode_event(data: bytes) -> StreamEvent:
    """Raises `msgspec.MsgspecError` (a `ValueError`) when the data is no event of the API."""
    return msgspec.json.decode(data, type=StreamEvent)
