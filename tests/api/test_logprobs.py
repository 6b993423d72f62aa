"""The three shapes of log-probabilities."""

from __future__ import annotations

import math

from cluster.api.choice import Piece
from cluster.api.logprobs import CompletionLogprobs, alternatives, chat_entries, prompt_entries
from sonar.messages import Logprob
from tests.api.fakes import BOS, EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def test_alternatives_are_the_most_likely_whether_or_not_the_drawn_token_is_among_them() -> None:
    top = [Logprob(5, -0.1, 1), Logprob(6, -2.0, 2)]
    assert alternatives([Logprob(6, -2.0, 2), *top], 2) == top, "drawn again among the alternatives"
    assert alternatives([Logprob(6, -2.0, 2), top[0]], 2) == top, "drawn only once"
    assert alternatives([Logprob(9, -9.0, 40), *top], 2) == top, "drawn is not among them"
    assert alternatives([Logprob(5, -0.1, 1)], 0) == []


def test_chat_entries_have_text_and_exact_bytes() -> None:
    piece = Piece("", [0xE2], [[Logprob(0xE2, -0.5, 1), Logprob(65, -math.inf, 2)]])
    assert chat_entries(TOKENIZER, piece, 2) == [
        {
            "token": "�",
            "logprob": -0.5,
            "bytes": [0xE2],
            "top_logprobs": [
                {"token": "�", "logprob": -0.5, "bytes": [0xE2]},
                {"token": "A", "logprob": -9999.0, "bytes": [65]},
            ],
        }
    ]


def test_prompt_entries_begin_with_null() -> None:
    rows = [[Logprob(66, -1.5, 3), Logprob(65, -0.5, 1)]]
    assert prompt_entries(TOKENIZER, rows) == [
        None,
        {
            "66": {"logprob": -1.5, "rank": 3, "decoded_token": "B"},
            "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
        },
    ]


def rows_of(token_ids: list[int]) -> list[list[Logprob]]:
    return [[Logprob(token_id, -1.0, 1)] for token_id in token_ids]


def test_completion_rows_count_characters_over_pieces() -> None:
    rows = CompletionLogprobs(TOKENIZER, 0, skip_special_tokens=True)
    first, second = list("a€".encode()[:3]), list("a€b".encode()[3:])
    form = rows.rows(first, rows_of(first))
    assert form == {
        "tokens": ["a", "bytes:\\xe2", "bytes:\\x82"],
        "token_logprobs": [-1.0] * 3,
        "top_logprobs": [{"a": -1.0}, {"bytes:\\xe2": -1.0}, {"bytes:\\x82": -1.0}],
        "text_offset": [0, 1, 1],
    }
    assert rows.rows([*second, EOS], rows_of([*second, EOS]))["text_offset"] == [1, 2, 3]


def test_the_drawn_token_is_shown_whatever_its_rank() -> None:
    rows = CompletionLogprobs(TOKENIZER, 1, skip_special_tokens=True)
    form = rows.rows([66], [[Logprob(66, -3.0, 9), Logprob(65, -0.5, 1)]])
    assert form["top_logprobs"] == [{"A": -0.5, "B": -3.0}]


def test_an_echoed_prompt_gives_no_characters_to_what_was_put_around_it() -> None:
    rows = CompletionLogprobs(TOKENIZER, 0, skip_special_tokens=True)
    token_ids = [BOS, *b"a", EOS, *b"b"]
    form = rows.prompt_rows(token_ids, rows_of(token_ids[1:]), "a</s>b")
    assert form["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert form["text_offset"] == [0, 0, 1, 5]
    assert rows.rows([65], rows_of([65]))["text_offset"] == [6], "output goes on behind the prompt"
