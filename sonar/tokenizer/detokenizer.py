"""Tokens of one sequence -> its text, as they come. Called by `OutputText` and by whoever streams without stops."""

from __future__ import annotations

import codecs

from sonar.tokenizer.tokenizer import Tokenizer, strip_spaces


class IncrementalDetokenizer:
    """Decodes a sequence token by token; the pieces put together are `Tokenizer.decode` of all its tokens.

    Never gives a part of a character: its bytes wait for the rest. The work for a token does not depend on how many
    came before.

    Args:
        after_text: see `Tokenizer.decode`: true for a completion of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, after_text: bool = False) -> None:
        self._token_to_bytes = tokenizer.token_to_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_left = 0 if after_text else tokenizer.strip_left

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        if token_id in self._skipped:
            return ""
        return self._strip(self._decoder.decode(self._token_to_bytes(token_id)))

    def flush(self) -> str:
        """What is left when no more tokens come: U+FFFD for a character that was begun and not ended."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_left:
            text, self._strip_left = strip_spaces(text, self._strip_left)
        return text
