"""Words a request forbids -> the token sequences the sampler bans. Called by the API and `sonar.llm`."""

from __future__ import annotations

from collections.abc import Sequence

from sonar.errors import UserError
from sonar.tokenizer.tokenizer import Tokenizer


def find_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The usual token sequences of each word, as the beginning of a word and inside of one; each once, in order.

    A model can still spell a word by other tokens: this is what OpenAI-compatible servers mean by bad words too.

    Raises:
        UserError: a word is empty or white space.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise UserError(f"bad_words contains {word!r}; give words with visible characters", param="bad_words")
        for spelling in (word, f" {word.lstrip()}"):
            if ids := tuple(tokenizer.encode_word_inside(spelling)):
                found[ids] = None
    return tuple(found)
