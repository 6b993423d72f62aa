"""Stop strings: found wherever a text is cut, against a search of the whole text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sonar.tokenizer import StopStrings
from sonar.tokenizer.stop_strings import StopMatch

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def _search(text: str, stops: list[str]) -> StopMatch | None:
    """The string that is complete first; of several the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


def _cut(text: str, at: list[int]) -> list[str]:
    places = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


@settings(max_examples=800, deadline=None)
@given(text=LETTERS, stops=STOPS, at=st.lists(st.integers(0, 100), max_size=8), include=st.booleans())
@example(text="aab", stops=["ab", "aab"], at=[1, 2], include=False)
@example(text="aaab", stops=["aab"], at=[], include=False)
def test_any_text_cut_anywhere(text: str, stops: list[str], at: list[int], include: bool) -> None:
    search = StopStrings(stops, include)
    passed = "".join(search.push(piece) for piece in _cut(text, at)) + search.flush()
    match = _search(text, stops)
    assert search.match == match
    if match is None:
        assert passed == text
    else:
        assert passed == text[: match.end if include else match.start]


@settings(max_examples=300, deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_holds_back_exactly_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    search = StopStrings(stops)
    passed = ""
    for end in range(1, len(text) + 1):
        passed += search.push(text[end - 1])
        if search.match is not None:
            return
        beginnings = [n for n in range(end + 1) if any(s.startswith(text[end - n : end]) for s in stops)]
        assert passed == text[: end - max(beginnings, default=0)]


def test_without_stops_everything_passes_at_once() -> None:
    search = StopStrings([])
    assert search.push("anything") == "anything"
    assert search.flush() == ""


def test_nothing_passes_after_a_match() -> None:
    search = StopStrings(["STOP"])
    assert [search.push(piece) for piece in ("go ST", "OP now", "more")] == ["go ", "", ""]
    assert search.flush() == ""
    assert search.match == StopMatch("STOP", 3, 7)


def test_long_stops_of_one_letter_stay_cheap() -> None:
    """Ten thousand characters against a string as long: quadratic work would take minutes."""
    search = StopStrings(["a" * 10_000 + "b"])
    passed = sum(len(search.push("a")) for _ in range(30_000))
    assert passed == 20_000
