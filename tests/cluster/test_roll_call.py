"""The wait for the first hosts: nothing is placed before it is over, and the missing are named at its deadline."""

from __future__ import annotations

import pytest

from cluster.config import NodesConfig
from cluster.roll_call import RollCall


def test_nobody_expected_is_no_wait() -> None:
    assert RollCall(NodesConfig()).is_over


@pytest.mark.parametrize(
    ("config", "here", "missing"),
    [
        (NodesConfig(("a", "b")), ["b"], ["a"]),
        (NodesConfig(min=3), ["x"], ["2 more of any name"]),
        (NodesConfig(("a", "b"), min=4), ["b", "x"], ["a", "1 more of any name"]),
        (NodesConfig(("a",), min=2), ["a", "x"], []),
    ],
)
def test_the_missing_have_names(config: NodesConfig, here: list[str], missing: list[str]) -> None:
    assert RollCall(config).missing(here) == missing


def test_the_wait_ends_when_all_are_here() -> None:
    roll_call = RollCall(NodesConfig(("a", "b"), join_timeout_s=10.0))
    assert roll_call.tick([], 5.0) == "" and roll_call.tick(["a"], 14.9) == ""
    assert not roll_call.is_over and roll_call.note(["a"]) == "waits for nodes: b"
    assert roll_call.tick(["b", "a"], 14.95) == "roll call: all nodes are here: a, b"
    assert roll_call.is_over and not roll_call.failure


def test_the_wait_ends_at_its_deadline_with_names() -> None:
    roll_call = RollCall(NodesConfig(("a", "b"), join_timeout_s=10.0))
    roll_call.tick([], 0.0)
    assert "missing b; here: a" in roll_call.tick(["a"], 10.0)
    assert roll_call.is_over and "missing b" in roll_call.failure
    assert roll_call.tick(["a"], 11.0) == "", "said once"
