"""The events of one request on their way from the request table to their one reader.

What a slow reader has not fetched is merged into one event: it holds up nobody, and takes no more room than its output.
Called by `cluster.requests` (writes) and `cluster.head_gateway` (reads). Knows nothing of replicas.
"""

from __future__ import annotations

import asyncio

import msgspec

from sonar.messages import TokenEvent


def merge_events(earlier: TokenEvent, later: TokenEvent) -> TokenEvent:
    """One event that says what both said; `later` continues where `earlier` ended."""
    assert later.first == earlier.first + len(earlier.token_ids), (earlier, later)
    return msgspec.structs.replace(
        later,
        first=earlier.first,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs,
        num_cached_tokens=max(earlier.num_cached_tokens, later.num_cached_tokens),
        kv_fetch=earlier.kv_fetch or later.kv_fetch,
    )


class RequestStream:
    """A mailbox of at most one (merged) event; one writer, one reader, one loop."""

    def __init__(self) -> None:
        self._waiting: TokenEvent | None = None
        self._news = asyncio.Event()
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        """Whether the terminal event was written."""
        return self._is_finished

    def push(self, event: TokenEvent) -> None:
        """Hands an event over; nothing may follow a terminal one."""
        assert not self._is_finished, event
        self._waiting = event if self._waiting is None else merge_events(self._waiting, event)
        self._is_finished = event.finish is not None
        self._news.set()

    async def next(self) -> TokenEvent:
        """All that has come since the last call, as one event; waits for a first one. Deadlines are the table's."""
        while (event := self.take()) is None:
            self._news.clear()
            await self._news.wait()
        return event

    def take(self) -> TokenEvent | None:
        """The same without waiting; None when nothing has come."""
        event, self._waiting = self._waiting, None
        return event
