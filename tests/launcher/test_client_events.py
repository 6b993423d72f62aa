"""Server-sent events: the same events wherever the network cuts the stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.client import events
from launcher.client.events import EventParser, decode_event

STREAM = b': comment\n\ndata: {"a":1}\r\n\r\ndata: one\ndata: two\n\nevent: x\ndata:three\nid: 4\n\n\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a":1}', b"one\ntwo", b"three", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    parser, found, begin = EventParser(), [], 0
    for end in [*sorted(cuts), len(STREAM)]:
        found += parser.feed(STREAM[begin:end])
        begin = end
    assert found == PAYLOADS


def test_an_unfinished_event_is_not_given_out() -> None:
    assert EventParser().feed(b"data: half") == []


def test_an_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 10)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        EventParser().feed(b"data: 0123456789")


def test_decoding_both_kinds_of_choice_and_errors() -> None:
    text = decode_event(b'{"id":"x","choices":[{"index":0,"text":"a","finish_reason":null}],"unknown":[1]}')
    assert text.choices[0].visible == "a" and text.choices[0].has_text
    chat = decode_event(b'{"choices":[{"delta":{"reasoning_content":"hm"}}],"usage":null}')
    assert chat.choices[0].visible == "" and chat.choices[0].has_text
    assert not decode_event(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}').choices[0].has_text
    error = decode_event(b'{"error":{"message":"no","type":"t","param":null}}').error
    assert error is not None and error.message == "no"
    with pytest.raises(ValueError):
        decode_event(b"{")
