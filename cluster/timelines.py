"""What has happened to each request, in words and times, for whoever asks why one was slow or broke off.

Bounded: open requests, and the last ones that ended. Knows nothing of requests but their ids; written by the request
table and its dispatcher, read for `sonar explain`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

ENDED_KEPT = 2000
MOMENTS_KEPT = 100
MATCHES_SHOWN = 20


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened. at_s: unix seconds."""

    at_s: float
    text: str


class Timeline(msgspec.Struct, array_like=True):
    """Of one sequence; a request with `n` or several prompts has one for each.

    Attributes:
        moments: in order; after the first MOMENTS_KEPT the rest are only counted, the end excepted.
    """

    request_id: str
    moments: list[Moment]
    is_open: bool = True
    num_left_out: int = 0


class Timelines:
    """Owner of them.

    Args:
        clock: unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._open: dict[str, Timeline] = {}
        self._ended: OrderedDict[str, Timeline] = OrderedDict()

    def note(self, request_id: str, text: str) -> None:
        """Something happened to a request; its first word opens the timeline."""
        timeline = self._open.get(request_id)
        if timeline is None:
            timeline = self._open[request_id] = Timeline(request_id, [])
        if len(timeline.moments) < MOMENTS_KEPT:
            timeline.moments.append(Moment(self._clock(), text))
        else:
            timeline.num_left_out += 1

    def end(self, request_id: str, text: str) -> None:
        """The last word on a request."""
        timeline = self._open.pop(request_id, None) or Timeline(request_id, [])
        timeline.moments.append(Moment(self._clock(), text))
        timeline.is_open = False
        self._ended.pop(request_id, None)
        self._ended[request_id] = timeline
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def find(self, asked: str) -> list[Timeline]:
        """Those whose id holds what was asked for, which may be an answer's id ("chatcmpl-..."); the latest last, at
        most MATCHES_SHOWN."""
        part = asked.rpartition("cmpl-")[2]
        if not part:
            return []
        known = [*self._ended.values(), *self._open.values()]
        return [timeline for timeline in known if part in timeline.request_id][-MATCHES_SHOWN:]
