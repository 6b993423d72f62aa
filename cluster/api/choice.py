"""One sequence of a response: from the gateway's token events to pieces of text. Pure: no clock, no socket.

What counts: every token the engine drew up to the one that ended the sequence, that one included, whether it was eos, a
stop id or the token that completed a stop string. Tokens that came later in the same event are neither shown nor
counted. `generation` drives it; `chat_format` and `completion_format` write the pieces down. `sonar.outputs` does the
same for offline use, but keeps all tokens and logprobs, which a long stream must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.api.errors import ApiError
from cluster.gateway import GenerateRequest
from sonar.errors import CapacityError, UserError
from sonar.messages import FinishReason, Logprob, TokenEvent
from sonar.tokenizer import OutputText


@dataclass(slots=True)
class Piece:
    """What one token event added to a choice.

    Attributes:
        text: to show now; may lag behind the tokens (half a character, the start of a stop string).
        token_ids: the event's counted tokens. logprobs: parallel to them, or empty.
        finish: set in the last piece.
        event: what it was made of.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: list[list[Logprob]] = field(default_factory=list)
    finish: FinishReason | None = None
    event: TokenEvent | None = None


class Choice:
    """State of one sequence; owns its text and counts.

    Args:
        index: the choice's number in the HTTP response.
        prompt_index: which of the HTTP request's prompts it continues.
    """

    def __init__(self, request: GenerateRequest, text: OutputText, *, index: int = 0, prompt_index: int = 0) -> None:
        self.request = request
        self.index = index
        self.prompt_index = prompt_index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[list[Logprob]] = []
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._text = text
        self._num_seen = 0

    def feed(self, event: TokenEvent) -> Piece:
        """Take the sequence's next event; after a piece with `finish` none may follow.

        Raises:
            ApiError, UserError: the engine gave the request up, or refused it.
        """
        if event.num_cached_tokens >= 0:
            self.num_cached_tokens = event.num_cached_tokens
        if event.prompt_logprobs:
            self.prompt_logprobs = event.prompt_logprobs
        if event.finish is FinishReason.ERROR:
            self.finish = event.finish
            raise _refusal(event)
        assert event.first == self._num_seen, f"{event.request_id}: token {event.first} after {self._num_seen}"
        self._num_seen += len(event.token_ids)
        delta = self._text.push(event.token_ids, is_last=event.finish is not None, stop_token_id=event.stop_token_id)
        token_ids, logprobs = event.token_ids, event.logprobs
        self.finish, self.stop_reason = event.finish, event.stop_token_id
        if delta.stop is not None:
            self.finish, self.stop_reason = FinishReason.STOP, delta.stop
            token_ids, logprobs = token_ids[: delta.num_tokens], logprobs[: delta.num_tokens]
        for entries in logprobs:
            self.cumulative_logprob += entries[0].logprob
        self.num_tokens += len(token_ids)
        return Piece(delta.text, token_ids, logprobs, self.finish, event)


def _refusal(event: TokenEvent) -> Exception:
    """What a terminal event with ERROR is to the client: its own fault (by code), or ours."""
    if event.error_code == "queue_full":
        return CapacityError(event.error, code=event.error_code)
    if event.error_code:
        return UserError(event.error, code=event.error_code)
    return ApiError(500, event.error or "the engine gave the request up", code="generation_failed")
