"""What a lead can tell again: the same as it told, from any token on, within its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.streams import merge_events
from sonar.messages import FinishReason, HeldRequest, Logprob, Submit, TokenEvent
from sonar.sampling_params import SamplingParams
from sonar.worker.replay import Replay


def submit(request_id: str, num_emitted: int = 0) -> Submit:
    sampling = SamplingParams(seed=1)
    return Submit(
        incarnation=1,
        request_id=request_id,
        prompt_token_ids=[1],
        sampling=sampling,
        emitted_token_ids=[0] * num_emitted,
    )


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    num_emitted=st.integers(0, 3),
    first=st.integers(0, 30),
    has_logprobs=st.booleans(),
    ends=st.booleans(),
)
def test_any_part_is_told_again_as_it_was(
    sizes: list[int], num_emitted: int, first: int, has_logprobs: bool, ends: bool
) -> None:
    replay, told, at = Replay(), [], num_emitted
    replay.begin(submit("r", num_emitted))
    for index, size in enumerate(sizes):
        is_last = ends and index == len(sizes) - 1
        event = TokenEvent(
            request_id="r",
            first=at,
            token_ids=list(range(at, at + size)),
            logprobs=[[Logprob(number, -1.0, 1)] for number in range(at, at + size)] if has_logprobs else [],
            num_cached_tokens=4 if index == 0 else -1,
            finish=FinishReason.STOP if is_last else None,
            stop_token_id=7 if is_last else None,
        )
        replay.record(event, 0.0)
        told.append(event)
        at += size
    assert replay.roll() == [HeldRequest(request_id="r", first=num_emitted, end=at, is_finished=ends)]
    again = replay.since("r", first)
    if not num_emitted <= first <= at:
        assert again is None
        return
    whole = told[0]
    for event in told[1:]:
        whole = merge_events(whole, event)
    assert again is not None
    assert again.token_ids == whole.token_ids[first - num_emitted :]
    assert again.logprobs == whole.logprobs[first - num_emitted :]
    assert (again.finish, again.stop_token_id) == (whole.finish, whole.stop_token_id)
    assert again.num_cached_tokens == 4


def test_what_has_ended_is_kept_for_its_time_and_makes_room_first() -> None:
    replay = Replay(max_tokens=100, kept_s=10.0)
    for name, is_ended in (("old", True), ("open", False), ("new", True)):
        replay.begin(submit(name))
        finish = FinishReason.LENGTH if is_ended else None
        replay.record(TokenEvent(request_id=name, first=0, token_ids=[1] * 30, finish=finish), 5.0)
    replay.expire(14.0)
    assert {held.request_id for held in replay.roll()} == {"old", "open", "new"}
    replay.record(TokenEvent(request_id="open", first=30, token_ids=[1] * 20), 14.0)
    assert {held.request_id for held in replay.roll()} == {"open", "new"}
    replay.expire(16.0)
    assert {held.request_id for held in replay.roll()} == {"open"}
    replay.record(TokenEvent(request_id="open", first=50, token_ids=[1] * 60), 16.0)
    assert replay.roll() == [] and replay.since("open", 50) is None
    replay.record(TokenEvent(request_id="open", first=110, token_ids=[1]), 16.0)
    assert replay.roll() == [], "what was forgotten in part is forgotten"
