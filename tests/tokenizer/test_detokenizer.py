"""Streaming detokenization: pieces put together are the decoded whole, for any ids, however they come."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sonar.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.tokenizer.cases import TEXTS


def _stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_in_pieces(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if "\x00" not in text:  # which neither vocabulary holds
        assert "".join(_stream(tokenizer, ids)) == text
    assert tokenizer.decode(ids) == tokenizer.core.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans(), after_text=st.booleans())
def test_any_ids(tokenizer: Tokenizer, data: st.DataObject, skip: bool, after_text: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=30))
    pieces = _stream(tokenizer, ids, skip_special_tokens=skip, after_text=after_text)
    assert "".join(pieces) == tokenizer.decode(ids, skip, after_text)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_decodes_as_the_tokenizers_package(demo: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, demo.vocab_size - 1), max_size=20))
    assert demo.decode(ids, skip) == demo.core.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_sentencepiece_decodes_as_the_tokenizers_package(pieces: Tokenizer, text: str) -> None:
    ids = pieces.encode(text, add_special_tokens=False)
    assert pieces.decode(ids) == pieces.core.decode(ids)


def test_no_piece_holds_half_a_character(demo: Tokenizer) -> None:
    ids = demo.encode("a🦜图")
    assert len(ids) > 3
    assert [piece for piece in _stream(demo, ids) if piece] == ["a", "🦜", "图"]


def test_a_character_begun_and_not_ended(demo: Tokenizer) -> None:
    ids = demo.encode("🦜")[:-1]
    assert ids
    assert _stream(demo, ids) == [""] * len(ids) + ["\ufffd"]
    assert demo.decode(ids) == "\ufffd"


def test_broken_bytes_do_not_hold_back_what_follows(pieces: Tokenizer) -> None:
    """After a stray byte the next good character comes at once."""
    stray, letter = pieces.token_to_id("<0xE5>"), pieces.token_to_id("a")
    assert stray is not None
    assert letter is not None
    assert _stream(pieces, [stray, letter, letter], after_text=True) == ["", "\ufffda", "a", ""]


def test_the_first_words_space(pieces: Tokenizer) -> None:
    ids = pieces.encode("Hello world", add_special_tokens=False)
    assert pieces.token_to_bytes(ids[0]).startswith(b" ")
    assert "".join(_stream(pieces, ids)) == "Hello world"
    assert "".join(_stream(pieces, ids, after_text=True)) == " Hello world"
    bos = pieces.bos_token_id
    assert bos is not None
    assert "".join(_stream(pieces, [bos, *ids])) == "Hello world", "a skipped token is not the beginning"


def test_special_tokens_are_skipped_or_shown(demo: Tokenizer) -> None:
    ids = demo.encode("a<|im_end|>b")
    assert "".join(_stream(demo, ids)) == "ab"
    assert "".join(_stream(demo, ids, skip_special_tokens=False)) == "a<|im_end|>b"


def test_bytes_of_tokens(demo: Tokenizer, pieces: Tokenizer) -> None:
    for tokenizer in (demo, pieces):
        ids = tokenizer.encode("é 图\n", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_to_bytes, ids)).strip(b" ") == "é 图\n".encode()
        assert tokenizer.token_to_bytes(tokenizer.vocab_size + 7) == b""
        assert tokenizer.token_to_bytes(-1) == b""
        assert tokenizer.token_to_bytes(2**40) == b""
