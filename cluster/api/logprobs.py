"""Log-probabilities in OpenAI's three shapes: chat, completions, and prompt_logprobs. Knows no HTTP.

A token may be part of a character. Chat entries then show U+FFFD and the exact `bytes`; the completions form, which has
no bytes field and keys a dict by the text, shows `bytes:\\xe2\\x82`, as OpenAI does.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from cluster.api.choice import Piece
from sonar.messages import Logprob
from sonar.tokenizer import Tokenizer

# JSON has no -Infinity; OpenAI sends this for a token that cannot be drawn.
LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """The value as JSON can carry it."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def alternatives(entries: Sequence[Logprob], count: int) -> list[Logprob]:
    """The `count` most likely of a token's entries, most likely first.

    Entries name the drawn token first and then the alternatives, among which it may stand again."""
    unique = {entry.token_id: entry for entry in entries}
    ranked = sorted(unique.values(), key=lambda entry: (entry.rank, -entry.logprob))
    return [entry for entry in ranked if entry.rank <= count][:count]


def chat_entries(tokenizer: Tokenizer, piece: Piece, count: int) -> list[dict[str, Any]]:
    """Items of `logprobs.content` for a piece."""
    items = []
    for entries in piece.logprobs:
        item = _chat_item(tokenizer, entries[0])
        item["top_logprobs"] = [_chat_item(tokenizer, entry) for entry in alternatives(entries, count)]
        items.append(item)
    return items


def _chat_item(tokenizer: Tokenizer, entry: Logprob) -> dict[str, Any]:
    raw = tokenizer.token_to_bytes(entry.token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(entry.logprob), "bytes": list(raw)}


def prompt_entries(tokenizer: Tokenizer, rows: Sequence[Sequence[Logprob]]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: null for the first prompt token, then per token a dict by id: the token itself first."""
    shown: list[dict[str, Any] | None] = [None]
    for entries in rows:
        shown.append(
            {
                str(entry.token_id): {
                    "logprob": finite(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": tokenizer.token_to_bytes(entry.token_id).decode("utf-8", "replace"),
                }
                for entry in entries
            }
        )
    return shown


class CompletionLogprobs:
    """Builds the completions form of one choice; counts characters over its pieces.

    text_offset is where a token's first whole character starts, in characters of the choice's text.

    Args:
        count: alternatives a token.
        skip_special_tokens: whether the output's text leaves them out.
    """

    def __init__(self, tokenizer: Tokenizer, count: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def rows(self, token_ids: Sequence[int], logprobs: Sequence[Sequence[Logprob]]) -> dict[str, list[Any]]:
        """The object for output tokens."""
        form = self._form(token_ids, logprobs)
        for token_id in token_ids:
            form["text_offset"].append(self._chars)
            if token_id not in self._skipped:
                self._chars += len(self._decoder.decode(self._tokenizer.token_to_bytes(token_id)))
        return form

    def prompt_rows(
        self, token_ids: Sequence[int], logprobs: Sequence[Sequence[Logprob]], text: str
    ) -> dict[str, list[Any]]:
        """The object for an echoed prompt: nulls for its first token, `logprobs` from the second on.

        Args:
            text: as echoed. Special tokens that were put around it, and the space SentencePiece puts before it, are no
                part of it and take no characters.
        """
        form = self._form(token_ids, [[], *logprobs])
        for token_id in token_ids:
            form["text_offset"].append(self._chars)
            shown = self._decoder.decode(self._tokenizer.token_to_bytes(token_id))
            if not text.startswith(shown, self._chars):
                shown = "" if token_id in self._tokenizer.special_ids else shown.removeprefix(" ")
            self._chars += len(shown)
        return form

    def _form(self, token_ids: Sequence[int], logprobs: Sequence[Sequence[Logprob]]) -> dict[str, list[Any]]:
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [finite(entries[0].logprob) if entries else None for entries in logprobs],
            "top_logprobs": [self._top(entries) if entries else None for entries in logprobs],
            "text_offset": [],
        }

    def _top(self, entries: Sequence[Logprob]) -> dict[str, float]:
        """The alternatives, and the drawn token whatever its rank."""
        shown = alternatives(entries, self._count)
        if all(entry.token_id != entries[0].token_id for entry in shown):
            shown.append(entries[0])
        return {self._text(entry.token_id): finite(entry.logprob) for entry in shown}

    def _text(self, token_id: int) -> str:
        raw = self._tokenizer.token_to_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
