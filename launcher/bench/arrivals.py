"""When requests of an open-loop run start: pure, seeded, in seconds from the run's begin."""

from __future__ import annotations

import random
from enum import Enum


class Arrival(Enum):
    """How the gaps between requests are spread around their mean."""

    POISSON = "poisson"
    CONSTANT = "constant"


def arrival_times(count: int, rate: float, kind: Arrival, seed: int) -> list[float]:
    """Start times of `count` requests at `rate` requests/s, the first at 0; all 0 when the rate is infinite."""
    generator = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += generator.expovariate(rate) if kind is Arrival.POISSON else 1.0 / rate
    return times
