"""From token events to text: what is shown, what counts, how a sequence ends."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.choice import Choice, Piece
from cluster.api.errors import ApiError
from cluster.gateway import GenerateRequest
from sonar.messages import FinishReason, Logprob, TokenEvent
from sonar.sampling_params import SamplingParams
from sonar.tokenizer import OutputText
from tests.api.fakes import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def choice_of(**sampling: object) -> Choice:
    params = SamplingParams(seed=1, **sampling)  # type: ignore[arg-type]
    return Choice(GenerateRequest("r", "m", [1, 2, 3], params), OutputText(TOKENIZER, params))


def event(text: bytes | list[int], **fields: object) -> TokenEvent:
    """An event; `run` numbers it."""
    return TokenEvent(request_id="r", first=0, token_ids=list(text), **fields)  # type: ignore[arg-type]


def run(choice: Choice, events: list[TokenEvent]) -> list[Piece]:
    pieces, number = [], 0
    for one in events:
        pieces.append(choice.feed(msgspec.structs.replace(one, first=number)))
        number += len(one.token_ids)
        if pieces[-1].finish is not None:
            break
    return pieces


def test_text_follows_whole_characters_and_counts_follow_tokens() -> None:
    choice = choice_of()
    pieces = run(choice, [event(b"\xe2"), event(b"\x82"), event(b"\xac!"), event(b"", finish=FinishReason.LENGTH)])
    assert [piece.text for piece in pieces] == ["", "", "€!", ""]
    assert choice.num_tokens == 4
    assert choice.finish is FinishReason.LENGTH


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    pieces = run(choice_of(), [event(b"a\xe2", finish=FinishReason.LENGTH)])
    assert pieces[0].text == "a�"


@pytest.mark.parametrize("include,text", [(False, "one "), (True, "one END")])
def test_a_stop_string_ends_text_and_count_inside_an_event(include: bool, text: str) -> None:
    choice = choice_of(stop=("END",), include_stop_in_output=include)
    pieces = run(choice, [event(b"one E"), event(b"NDless"), event(b"never")])
    assert "".join(piece.text for piece in pieces) == text
    assert choice.num_tokens == len("one END")
    assert (choice.finish, choice.stop_reason) == (FinishReason.STOP, "END")


def test_what_only_looked_like_a_stop_string_is_shown_at_the_end() -> None:
    pieces = run(choice_of(stop=("END",)), [event(b"the EN"), event(b"", finish=FinishReason.LENGTH)])
    assert [piece.text for piece in pieces] == ["the ", "EN"]


def test_a_stop_string_completed_by_the_last_token_is_a_stop() -> None:
    choice = choice_of(stop=("END",))
    run(choice, [event(b"xEND", finish=FinishReason.LENGTH)])
    assert choice.finish is FinishReason.STOP


def test_eos_counts_but_does_not_show() -> None:
    choice = choice_of()
    pieces = run(choice, [event([*b"hi", EOS], finish=FinishReason.STOP, stop_token_id=EOS)])
    assert pieces[0].text == "hi"
    assert (choice.num_tokens, choice.stop_reason) == (3, EOS)


@pytest.mark.parametrize("include,text", [(False, "hi"), (True, "hi!")])
def test_a_stop_id_shows_only_when_asked(include: bool, text: str) -> None:
    choice = choice_of(stop_token_ids=(33,), include_stop_in_output=include)
    assert run(choice, [event(b"hi!", finish=FinishReason.STOP, stop_token_id=33)])[0].text == text


def test_a_terminal_event_without_its_stop_token_hides_nothing() -> None:
    pieces = run(choice_of(), [event(b"hi", finish=FinishReason.STOP, stop_token_id=EOS)])
    assert pieces[0].text == "hi"


def test_logprobs_are_cut_with_the_tokens() -> None:
    rows = [[Logprob(token_id, -0.5, 1)] for token_id in b"aENDbb"]
    choice = choice_of(stop=("END",), logprobs=0)
    piece = run(choice, [event(b"aENDbb", logprobs=rows)])[0]
    assert len(piece.logprobs) == len(piece.token_ids) == 4
    assert choice.cumulative_logprob == -2.0


def test_cached_tokens_and_prompt_logprobs_come_from_the_first_event() -> None:
    choice = choice_of()
    rows = [[Logprob(2, -1.0, 1)], [Logprob(3, -1.0, 1)]]
    run(choice, [event(b"a", num_cached_tokens=2, prompt_logprobs=rows), event(b"b")])
    assert (choice.num_cached_tokens, choice.prompt_logprobs) == (2, rows)


def test_a_gap_or_a_repeat_is_never_shown() -> None:
    for first in (0, 3):
        choice = choice_of()
        choice.feed(event(b"ab"))
        with pytest.raises(AssertionError, match="after 2"):
            choice.feed(msgspec.structs.replace(event(b"c"), first=first))


def test_an_error_event_carries_its_text() -> None:
    choice = choice_of()
    with pytest.raises(ApiError, match="replica lost") as caught:
        run(choice, [event(b"a"), event(b"", finish=FinishReason.ERROR, error="replica lost")])
    assert caught.value.status == 500
    assert choice.finish is FinishReason.ERROR


@given(st.binary(max_size=60), st.lists(st.integers(1, 7)), st.sampled_from([(), ("ab",), ("a", "aab"), ("€",)]))
def test_pieces_do_not_depend_on_how_tokens_are_grouped(data: bytes, sizes: list[int], stop: tuple[str, ...]) -> None:
    """The same tokens one by one or in any groups: the same text, count and end."""

    def outcome(groups: list[bytes]) -> tuple[str, int, FinishReason | None, object]:
        choice = choice_of(stop=stop)
        pieces = run(choice, [*map(event, groups), event(b"", finish=FinishReason.LENGTH)])
        return "".join(piece.text for piece in pieces), choice.num_tokens, choice.finish, choice.stop_reason

    groups, at = [], 0
    for size in [*sizes, len(data)]:
        groups.append(data[at : at + size])
        at += size
    singly = [data[i : i + 1] for i in range(len(data))]
    assert outcome(groups) == outcome(singly)
