"""Timelines: bounded, found by any part of an id, and complete for a request that moved."""

from __future__ import annotations

from cluster.timelines import ENDED_KEPT, MATCHES_SHOWN, MOMENTS_KEPT, Timelines
from tests.cluster.bench import Bench


def test_a_moved_request_tells_where_it_was_and_why() -> None:
    bench = Bench()
    bench.open_route("m-0")
    bench.open_route("m-1")
    bench.submit("cmpl-77-0", 4)
    bench.step()
    bench.now = 5.0
    first = bench.table.timelines.find("77")[0].moments[1].text.split()[2]
    bench.kill(first)
    bench.now = 6.5
    for _ in range(3):
        bench.step()
    (timeline,) = bench.table.timelines.find("chatcmpl-77")
    other = {"m-0": "m-1", "m-1": "m-0"}[first]
    words = [moment.text for moment in timeline.moments]
    assert words[0].startswith("accepted for m: ") and not timeline.is_open
    assert words[1].startswith(f"sent to {first} incarnation ") and f"against {other} " in words[1]
    assert words[2].startswith("first token")
    assert words[3].startswith(f"its attempt at {first} incarnation ") and "is over after 1 tokens" in words[3]
    assert words[4].startswith(f"sent to {other} incarnation ")
    assert words[5] == "goes on with token 2 after 1.50 s"
    assert words[6:] == ["ended (length), 4 tokens"]


def test_what_is_kept_is_bounded() -> None:
    seconds = iter(range(1_000_000))
    timelines = Timelines(lambda: float(next(seconds)))
    for _ in range(MOMENTS_KEPT + 5):
        timelines.note("busy", "again")
    timelines.end("busy", "ended")
    (busy,) = timelines.find("busy")
    assert len(busy.moments) == MOMENTS_KEPT + 1 and busy.num_left_out == 5 and busy.moments[-1].text == "ended"
    for number in range(ENDED_KEPT):
        timelines.end(f"r{number}", "ended")
    assert timelines.find("busy") == []
    found = timelines.find("r")
    assert len(found) == MATCHES_SHOWN and found[-1].request_id == f"r{ENDED_KEPT - 1}"
    timelines.note("open", "accepted")
    assert timelines.find("open")[0].is_open
    assert timelines.find("") == timelines.find("chatcmpl-") == []
