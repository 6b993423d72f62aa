"""Counters of a scheduler since its incarnation began.

Called by the scheduler; read by whoever reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from sonar.request import Request


@dataclass(slots=True)
class Totals:
    """Absolute values.

    Attributes:
        arrivals: requests taken in. batches: steps handed out. steps: steps whose results are in.
        prompt_tokens: of requests admitted, once each. cached_tokens: those of them found in the prefix cache.
        generated_tokens: tokens reported. preemptions: requests that lost their blocks.
        queue_seconds: from arrival to first admission. first_token_seconds: from arrival to first token. Sums.
    """

    arrivals: int = 0
    batches: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0

    def count_admission(self, request: Request, num_cached_tokens: int, now: float) -> None:
        """Counts a request's first admission, and notes its cached tokens for its first event."""
        first = request.first_event
        if first is None or first.num_cached_tokens >= 0:
            return
        first.num_cached_tokens = max(0, min(num_cached_tokens, request.spec.prompt_len) - request.peers.num_fresh)
        self.prompt_tokens += request.spec.prompt_len
        self.cached_tokens += first.num_cached_tokens
        self.queue_seconds += now - request.spec.arrival_s
