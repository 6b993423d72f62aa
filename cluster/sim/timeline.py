"""Simulated time: actions in the order of their moments, without waiting. Knows nothing of clusters."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Timeline:
    """Owner of the simulated clock. Actions of one moment run in the order they were planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._next_number = 0

    def clock(self) -> float:
        """Monotonic simulated seconds."""
        return self.now_s

    def after(self, delay_s: float, action: Action) -> None:
        """Plans an action."""
        heapq.heappush(self._due, (self.now_s + delay_s, self._next_number, action))
        self._next_number += 1

    def every(self, interval_s: float, action: Callable[[], bool], first_s: float) -> None:
        """Plans an action again and again, until it returns False."""

        def turn() -> None:
            if action():
                self.after(interval_s, turn)

        self.after(first_s, turn)

    def run(self, seconds: float) -> None:
        """Lets so much time pass."""
        end_s = self.now_s + seconds
        while self._due and self._due[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        self.now_s = end_s
