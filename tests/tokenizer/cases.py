"""Tokenizers for the tests: one of each kind, small, and texts that break careless ones."""

from __future__ import annotations

from pathlib import Path

from sonar.model_source import resolve_model
from sonar.tokenizer import Tokenizer, load_tokenizer
from sonar.tokenizer.chat_template import ChatTemplates
from sonar.tokenizer.sentencepiece_file import SentencePieceFile
from sonar.tokenizer.tokenizer import SpecialTokens
from sonar.tokenizer.vocabulary import build_sentencepiece

DATA = Path(__file__).parent.parent / "data"
TEXTS = (
    "Hello world",
    "  two  spaces, trailing  ",
    "x   12, y  = 3456 and z\t789",
    "def f(x):\n    return x\n\n\n# done\r\n",
    "«Où est la bibliothèque ?» — 图书馆在哪里？ 🙂🏽 👩‍👩‍👧 \u200b",
    "e\u0301 é ﬁ Ⅷ ½ ٣٤",
    "don't I'LL we've 's",
    "",
    " ",
    "\n",
    "\x00\x7f",
)


def smollm2_tokenizer() -> Tokenizer:
    """Byte-level, from the demo model's GGUF file."""
    return load_tokenizer(resolve_model("smollm2-135m"))


def sentencepiece_tokenizer(add_space_prefix: bool = True) -> Tokenizer:
    """SentencePiece with byte fallback, 600 tokens."""
    file = SentencePieceFile(DATA / "tiny_sentencepiece.model")
    core = build_sentencepiece(file.vocabulary, file.scores, add_space_prefix=add_space_prefix)
    return Tokenizer(core, SpecialTokens(file.special_names), ChatTemplates({}, "tiny"), "tiny")
