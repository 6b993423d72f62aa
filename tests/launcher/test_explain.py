"""What `sonar explain` shows."""

from __future__ import annotations

from cluster.timelines import Moment, Timeline
from launcher.cli.explain import timeline_lines


def test_times_count_from_the_request() -> None:
    ended = Timeline("a-0", [Moment(100.0, "accepted"), Moment(101.25, "ended")], is_open=False, num_left_out=3)
    lines = timeline_lines([ended, Timeline("a-1", [Moment(100.0, "accepted")])])
    assert lines[0].startswith("a-0  ") and lines[4].startswith("a-1  ")
    assert lines[1:4] == ["      0.000 s  accepted", "      1.250 s  ended", "  (3 more before the last are left out)"]
    assert lines[-1] == "  it is still open"
