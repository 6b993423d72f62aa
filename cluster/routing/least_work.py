"""The routing policy: the replica that has least to compute before this request's first token, as a pure function.

Work is counted in prompt tokens still to be computed: the request's own that are not cached there, those of requests
ahead of it, and a share for each open stream, whose decode steps take turns with the prefill. The numbers only rank
replicas; they predict no time. Called by `cluster.routing.routes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# One decode step of a stream, against prefill: a step takes at most a few dozen prefill tokens' time on any device.
STREAM_TOKENS = 16
# Each request beyond those computed at once waits for another to end, which is worth a long prompt.
QUEUED_TOKENS = 1024
# A session stays where it was unless that costs more than this.
SESSION_TOKENS = 256


@dataclass(frozen=True)
class Candidate:
    """What the choice knows of a replica.

    Attributes:
        cached_tokens: of this request's prompt. pending_tokens: of other requests' prompts that wait there.
        num_open: requests sent there that have not ended. has_session: it served this session last.
    """

    replica_id: str
    cached_tokens: int
    pending_tokens: int
    num_open: int
    max_num_requests: int
    has_session: bool


class Score(NamedTuple):
    """A candidate's work, taken apart; the sum decides."""

    replica_id: str
    uncached: int
    pending: int
    streams: int
    queued: int
    session: int

    @property
    def total(self) -> int:
        """Smaller is better."""
        return self.uncached + self.pending + self.streams + self.queued + self.session


class Decision(NamedTuple):
    """The chosen replica, and the scores of all that were weighed, best first, for whoever asks why."""

    replica_id: str
    scores: tuple[Score, ...]


def choose_replica(num_tokens: int, candidates: Sequence[Candidate]) -> Decision:
    """Chooses among at least one candidate; equal ones by name, so that the choice can be repeated.

    Args:
        num_tokens: prompt and emitted tokens that the replica will have to know.
    """
    scores = sorted((_score(num_tokens, c) for c in candidates), key=lambda score: (score.total, score.replica_id))
    return Decision(scores[0].replica_id, tuple(scores))


def standing_load(candidate: Candidate) -> int:
    """What a replica has to do already: the part of its score that is the same for every request."""
    queued = QUEUED_TOKENS * max(0, candidate.num_open + 1 - candidate.max_num_requests)
    return candidate.pending_tokens + STREAM_TOKENS * candidate.num_open + queued


def _score(num_tokens: int, candidate: Candidate) -> Score:
    return Score(
        candidate.replica_id,
        uncached=max(1, num_tokens - candidate.cached_tokens),
        pending=candidate.pending_tokens,
        streams=STREAM_TOKENS * candidate.num_open,
        queued=QUEUED_TOKENS * max(0, candidate.num_open + 1 - candidate.max_num_requests),
        session=-SESSION_TOKENS if candidate.has_session else 0,
    )
