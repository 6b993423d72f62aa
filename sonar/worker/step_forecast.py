"""How long a step may take, from those before it: what tells a long step from one that hangs.

Pure. A step's time grows with its tokens, more slowly than they do, so what is known of fewer tokens bounds what more
of them take, and what is known of more tokens bounds fewer. Called by `sonar.worker.lead_loop`; the margin over a
forecast is its reader's (`cluster.replica_life`).
"""

from __future__ import annotations

# Before anything was measured: 2,048 tokens of an 8B model take minutes on a few CPU cores.
UNKNOWN_S = 150.0
# The first step of a size may compile kernels for it.
NEW_SIZE_S = 30.0
# What one slower step weighs after a quicker one: sizes hold a range of tokens, and contexts grow.
DECAY = 0.8


class StepForecast:
    """Seconds by size class: steps of 1, 2 to 3, 4 to 7 ... tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._began_s = 0.0

    def began(self, now: float) -> None:
        """A step begins. now: monotonic seconds."""
        self._began_s = now

    def ended(self, num_tokens: int, now: float) -> None:
        """The step that began last has ended."""
        self.measured(num_tokens, now - self._began_s)

    def expected_s(self, num_tokens: int) -> float:
        """At most so long, if all goes as before."""
        size = num_tokens.bit_length()
        known = self._seconds.get(size)
        if known is not None:
            return known
        smaller = [other for other in self._seconds if other < size]
        if smaller:
            return max(NEW_SIZE_S, self._seconds[max(smaller)] * float(2 ** (size - max(smaller))))
        return max(NEW_SIZE_S, self._seconds[min(self._seconds)]) if self._seconds else UNKNOWN_S

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A step has ended. A size keeps its slowest, which fades."""
        size = num_tokens.bit_length()
        self._seconds[size] = max(seconds, self._seconds.get(size, 0.0) * DECAY)
