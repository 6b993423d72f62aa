"""The judge of the fault suite finds what it is there to find: recorded histories, sound and broken."""

from __future__ import annotations

import dataclasses

import pytest

from tests.faults.history import Owner, Record, check, check_owners, faults_of

EXPECTED = {"0": {"text": "abc", "end": "length", "logprobs": []}, "usage": {"completion_tokens": 3}}
SOUND = Record(
    "seeded stream",
    10.0,
    is_durable=True,
    times_s=[10.1, 10.2, 12.0, 12.1],
    ids=[("cmpl-1", 1), ("cmpl-1", 2), ("cmpl-1", 3), ("cmpl-1", 4)],
    output=EXPECTED,
    ended_s=12.1,
)


def test_a_sound_history_passes() -> None:
    check([SOUND, dataclasses.replace(SOUND, ids=[], refusals=3)], {"seeded stream": EXPECTED})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ended_s": None}, "never ended"),
        ({"error": "500 oh"}, "ended with 500 oh"),
        ({"output": None}, "no output"),
        ({"output": {**EXPECTED, "0": {"text": "abd"}}}, "differs: 0:"),
        ({"output": {**EXPECTED, "1": {}}}, "more than expected: ['1']"),
        ({"ids": [("cmpl-1", 1), ("cmpl-1", 3), ("cmpl-1", 4)]}, "event 2 has number 3"),
        ({"ids": [("cmpl-1", 1), ("cmpl-1", 2), ("cmpl-1", 2)]}, "event 3 has number 2"),
        ({"ids": [("cmpl-1", 1), ("cmpl-2", 2)]}, "several streams"),
    ],
)
def test_a_broken_promise_is_named(change: dict[str, object], words: str) -> None:
    broken = dataclasses.replace(SOUND, **change)  # type: ignore[arg-type]
    assert words in "; ".join(faults_of(broken, EXPECTED))
    with pytest.raises(AssertionError, match="seeded stream sent at"):
        check([SOUND, broken], {"seeded stream": EXPECTED})


def test_pauses_count_where_they_touch_the_time_of_the_fault() -> None:
    assert SOUND.longest_pause_s(11.0, 11.5) == pytest.approx(1.8)
    assert SOUND.longest_pause_s(10.0, 10.15) == pytest.approx(0.1)
    silent = Record("seeded stream", 10.0)
    assert silent.longest_pause_s(9.0, 15.0) == pytest.approx(5.0)
    assert silent.is_open(11.0) and SOUND.is_open(11.0) and not SOUND.is_open(12.1) and not SOUND.is_open(9.9)


def test_a_rank_has_one_owner() -> None:
    first, second = Owner(1.0, "tiny-0", 1, (7,)), Owner(2.0, "tiny-0", 2, (8,))
    check_owners([second, first, Owner(3.0, "tiny-1", 1, (9,))])
    with pytest.raises(AssertionError, match="after incarnation 2"):
        check_owners([first, second, Owner(3.0, "tiny-0", 1, (7,))])
    with pytest.raises(AssertionError, match="process 8 is of"):
        check_owners([first, second, Owner(3.0, "tiny-1", 1, (8,))])
