"""What a run's requests amount to: latencies as percentiles, rates, errors. Pure arithmetic over records.

Terms: TTFT is from the request's start to its first token; ITL the gap between two stream events that bring text
(servers may put several tokens in one); TPOT = (end to end - TTFT) / (output tokens - 1); E2E to the last event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

PERCENTILES = (50, 90, 99)


@dataclass
class RequestRecord:
    """What the client saw of one request; times in seconds on one monotonic clock.

    Attributes:
        start_s: when it was due (open loop) or sent (closed loop).
        event_times_s: arrival of each event that brought text.
        prompt_tokens, cached_tokens, output_tokens: as the server's usage tells.
        error: empty when it ended well, else a short reason.
    """

    start_s: float
    event_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


class Spread(msgspec.Struct, frozen=True):
    """A quantity over many samples."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread | None:
        """None when there is no sample: a missing figure is not a zero."""
        if not samples:
            return None
        ordered = sorted(samples)
        p50, p90, p99 = (percentile(ordered, p) for p in PERCENTILES)
        return cls(len(ordered), sum(ordered) / len(ordered), ordered[0], p50, p90, p99, ordered[-1])


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Latencies in milliseconds, over completed requests only; rates over the whole duration."""

    completed: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks of a sorted, non-empty sequence."""
    position = (len(ordered) - 1) * percent / 100.0
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def ttft_samples_ms(records: Sequence[RequestRecord]) -> list[float]:
    """One sample a completed request that brought text."""
    return [1e3 * (r.event_times_s[0] - r.start_s) for r in _completed(records) if r.event_times_s]


def itl_samples_ms(records: Sequence[RequestRecord]) -> list[float]:
    """All gaps of all completed requests."""
    return [
        1e3 * (after - before)
        for r in _completed(records)
        for before, after in zip(r.event_times_s, r.event_times_s[1:])
    ]


def summarize(records: Sequence[RequestRecord], duration_s: float) -> Summary:
    """Figures of a run. duration_s: from its begin to the end of its last request."""
    good = _completed(records)
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    tpot = [
        1e3 * (r.end_s - r.event_times_s[0]) / (r.output_tokens - 1)
        for r in good
        if r.event_times_s and r.output_tokens > 1
    ]
    return Summary(
        completed=len(good),
        failed=len(records) - len(good),
        errors=dict(Counter(r.error for r in records if r.error)),
        duration_s=duration_s,
        requests_per_s=len(good) / duration_s,
        output_tokens_per_s=output / duration_s,
        total_tokens_per_s=(prompt + output) / duration_s,
        prompt_tokens=prompt,
        cached_tokens=sum(r.cached_tokens for r in good),
        output_tokens=output,
        ttft_ms=Spread.of(ttft_samples_ms(records)),
        itl_ms=Spread.of(itl_samples_ms(records)),
        tpot_ms=Spread.of(tpot),
        e2e_ms=Spread.of([1e3 * (r.end_s - r.start_s) for r in good]),
    )


def _completed(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [r for r in records if not r.error]
