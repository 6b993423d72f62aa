"""What a lead has told of its requests, kept so that it can be told again: to a head that is new, or lost some of it.

A head that dies takes its connections with it, not its replicas: they compute on, and the next head asks each request's
tokens from the last one that it knows of. Ended requests are kept for a while. Bounded: when the tokens of all requests
are too many, those that ended first go first, then the oldest open ones; a request that is forgotten is computed again
elsewhere, which costs time and nothing else. Pure; `now` is handed in. Called by `sonar.worker.lead_loop`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from sonar.messages import HeldRequest, KVFetchRecord, Logprob, RequestId, Submit, TokenEvent

# After its end: as long as a head may take to come back or be replaced, and to ask.
KEPT_S = 60.0
# Each takes some 40 bytes; an alternative's logprob counts as two.
MAX_TOKENS = 1_000_000


@dataclass
class _Told:
    """One request's output so far. end: its terminal event, with all other fields as they were; None while it is open.

    prompt_logprobs, num_cached_tokens, kv_fetch: of the first event that told them."""

    first: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Logprob]] = field(default_factory=list)
    prompt_logprobs: list[list[Logprob]] = field(default_factory=list)
    num_cached_tokens: int = -1
    kv_fetch: KVFetchRecord | None = None
    end: TokenEvent | None = None
    ended_s: float = 0.0
    weight: int = 1


class Replay:
    """Owner of the kept outputs."""

    def __init__(self, max_tokens: int = MAX_TOKENS, kept_s: float = KEPT_S) -> None:
        self._max_tokens = max_tokens
        self._kept_s = kept_s
        self._open: dict[RequestId, _Told] = {}
        self._ended: dict[RequestId, _Told] = {}
        self._weight = 0

    def begin(self, submit: Submit) -> None:
        """A request is taken in."""
        self._open[submit.request_id] = _Told(len(submit.emitted_token_ids))
        self._weight += 1

    def record(self, event: TokenEvent, now: float) -> None:
        """An event is told, or would be if there were a head."""
        told = self._open.get(event.request_id)
        if told is None:
            return
        told.token_ids += event.token_ids
        weight = len(event.token_ids)
        if event.logprobs:
            told.logprobs += event.logprobs
            weight += 2 * sum(map(len, event.logprobs))
        if event.prompt_logprobs:
            told.prompt_logprobs = event.prompt_logprobs
            weight += 2 * sum(map(len, event.prompt_logprobs))
        told.num_cached_tokens = max(told.num_cached_tokens, event.num_cached_tokens)
        told.kv_fetch = told.kv_fetch or event.kv_fetch
        told.weight += weight
        self._weight += weight
        if event.finish is not None:
            told.end, told.ended_s = event, now
            self._ended[event.request_id] = self._open.pop(event.request_id)
        if self._weight > self._max_tokens:
            self._make_room()

    def expire(self, now: float) -> None:
        """Forgets what ended long ago."""
        for request_id, told in list(self._ended.items()):
            if now - told.ended_s <= self._kept_s:
                return
            self._forget(self._ended, request_id)

    def roll(self) -> list[HeldRequest]:
        """All that can be told again."""
        return [
            HeldRequest(
                request_id=request_id,
                first=told.first,
                end=told.first + len(told.token_ids),
                is_finished=told.end is not None,
            )
            for kept in (self._open, self._ended)
            for request_id, told in kept.items()
        ]

    def since(self, request_id: RequestId, first: int) -> TokenEvent | None:
        """A request's output from a token on, as one event; None when it is not held from there."""
        told = self._open.get(request_id) or self._ended.get(request_id)
        if told is None or not told.first <= first <= told.first + len(told.token_ids):
            return None
        skip = first - told.first
        rest = TokenEvent(
            request_id=request_id,
            first=first,
            token_ids=told.token_ids[skip:],
            logprobs=told.logprobs[skip:],
            prompt_logprobs=told.prompt_logprobs,
            num_cached_tokens=told.num_cached_tokens,
            kv_fetch=told.kv_fetch,
        )
        if told.end is None:
            return rest
        return msgspec.structs.replace(
            rest,
            finish=told.end.finish,
            stop_token_id=told.end.stop_token_id,
            error=told.end.error,
            error_code=told.end.error_code,
        )

    def _make_room(self) -> None:
        for kept in (self._ended, self._open):
            for request_id in list(kept):
                if self._weight <= self._max_tokens:
                    return
                self._forget(kept, request_id)

    def _forget(self, kept: dict[RequestId, _Told], request_id: RequestId) -> None:
        self._weight -= kept.pop(request_id).weight
