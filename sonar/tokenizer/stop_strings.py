"""Finding stop strings in a text that comes in pieces. Knows nothing of tokens. Called by `OutputText`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """A stop string was found. stop: it. start, end: where it lies in the whole text, in characters."""

    stop: str
    start: int
    end: int


class StopStrings:
    """Passes a text on, holding back the end of it that may become a stop string.

    The string that is complete first ends the text; of several complete at the same character the longest counts. So
    the result does not depend on how the text was cut into pieces. The search is Knuth, Morris and Pratt's (1977), one
    automaton a string: the work for a character does not depend on the strings' lengths.

    Args:
        stops: non-empty strings, maybe none.
        include_stop: pass the stop string on too.

    Attributes:
        match: what was found; None so far. After a match nothing is passed on.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self.match: StopMatch | None = None
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""
        self._num_passed = 0

    def push(self, text: str) -> str:
        """What of the text so far can be passed on now."""
        if self.match is not None or not text:
            return ""
        if not self._held and not any(automaton.stop[0] in text for automaton in self._automata):
            return self.skip(text)
        seen = self._held + text
        for index in range(len(self._held), len(seen)):
            for automaton in self._automata:
                if automaton.step(seen[index]):
                    return self._stop_at(seen, index + 1, automaton.stop)
        return self._pass(seen, len(seen) - max(automaton.matched for automaton in self._automata))

    def skip(self, text: str) -> str:
        """Pass text on without looking for stop strings in it; only while nothing is held back."""
        assert not self._held, self._held
        self._num_passed += len(text)
        return text

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        return self._pass(self._held, len(self._held))

    def _stop_at(self, seen: str, end: int, stop: str) -> str:
        start = end - len(stop)
        self.match = StopMatch(stop, self._num_passed + start, self._num_passed + end)
        passed = self._pass(seen, end if self._include_stop else start)
        self._held = ""
        return passed

    def _pass(self, seen: str, count: int) -> str:
        self._held = seen[count:]
        self._num_passed += count
        return seen[:count]


class _Automaton:
    """How much of one string the text so far ends with. matched: that many characters."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0] * len(stop)  # of each prefix: the longest proper part that is its beginning and its end
        for index in range(1, len(stop)):
            length = self._borders[index - 1]
            while length and stop[index] != stop[length]:
                length = self._borders[length - 1]
            self._borders[index] = length + (stop[index] == stop[length])

    def step(self, char: str) -> bool:
        """Take one character; whether the string is complete with it."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._borders[self.matched - 1]
        self.matched += self.stop[self.matched] == char
        return self.matched == len(self.stop)
