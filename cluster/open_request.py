"""A request that has not ended, as the head keeps it beside its journal entry, and the events made for it.

Pure data and functions of `cluster.requests` and `cluster.dispatcher`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from cluster.journal import JournalEntry
from cluster.streams import RequestStream
from cluster.suspects import Strikes
from sonar.messages import FinishReason, TokenEvent

MAX_PAUSES_KEPT = 10_000


@dataclass(eq=False)
class OpenRequest:
    """A request that has not ended; owned by the request table.

    Attributes:
        queued_s: since when it has been waiting for a replica.
        broken_s: since when its replica is dead; None while tokens can flow.
        awaits_holder: an earlier head began it; it is sent nowhere until it is known which replica has it, if any.
        has_prompt_news: the first event's prompt figures were handed out; a later attempt's are not, again.
    """

    entry: JournalEntry
    deployment: str
    stream: RequestStream
    queued_s: float
    strikes: Strikes = field(default_factory=Strikes)
    broken_s: float | None = None
    awaits_holder: bool = False
    has_prompt_news: bool = False
    is_done: bool = False

    @property
    def num_emitted(self) -> int:
        """Tokens the client has."""
        return len(self.entry.emitted_token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Sooner is smaller: priority, then admission; a moved request is ahead of those that came after it."""
        return self.entry.request.priority, self.entry.number


@dataclass
class RequestCounters:
    """What metrics read.

    Attributes:
        tokens_replayed: emitted tokens that a replica had to be told again.
        resumed: attempts that went on after the head or the connection was new, without being computed again.
        abandoned: of an earlier head, ended because nobody came for them. convicted: see `cluster.suspects`.
        late_events: of attempts that were given up. pauses_s: the clients' waits over a replica's death, until whoever
            observes them takes them out; at most MAX_PAUSES_KEPT.
    """

    accepted: int = 0
    refused: int = 0
    tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    migrations: int = 0
    tokens_replayed: int = 0
    resumed: int = 0
    abandoned: int = 0
    convicted: int = 0
    sequence_gaps: int = 0
    repeated_tokens: int = 0
    late_events: int = 0
    pauses_s: list[float] = field(default_factory=list)

    def count_pause(self, seconds: float) -> None:
        """A stream went on after so long."""
        if len(self.pauses_s) < MAX_PAUSES_KEPT:
            self.pauses_s.append(seconds)


def terminal_event(request: OpenRequest, finish: FinishReason, error: str = "") -> TokenEvent:
    """The end of a request by the head's own decision."""
    request_id = request.entry.request.request_id
    return TokenEvent(request_id=request_id, first=request.num_emitted, token_ids=[], finish=finish, error=error)


def news_of(event: TokenEvent, request: OpenRequest) -> TokenEvent:
    """A replica's event without what the client has already: tokens it knows, and prompt figures given before.

    The event may begin before the next token, never after it."""
    skip = request.num_emitted - event.first
    assert skip >= 0, (event, request.num_emitted)
    again = request.has_prompt_news
    return msgspec.structs.replace(
        event,
        request_id=request.entry.request.request_id,
        first=request.num_emitted,
        token_ids=event.token_ids[skip:],
        logprobs=event.logprobs[skip:],
        prompt_logprobs=[] if again else event.prompt_logprobs,
        num_cached_tokens=-1 if again else event.num_cached_tokens,
    )
