"""The least number of tokens is never more than there are, and near it where tokens are short."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from sonar.tokenizer import Tokenizer
from sonar.tokenizer.chat_template import ChatTemplates
from sonar.tokenizer.length_bound import LengthBound
from sonar.tokenizer.pre_tokenizers import PreTokenizer
from sonar.tokenizer.tokenizer import SpecialTokens
from sonar.tokenizer.vocabulary import TokenType, Vocabulary, build_byte_level
from tests.api.fakes import byte_tokenizer

from .cases import TEXTS, sentencepiece_tokenizer

ALPHABET = set(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*, nfc: bool = False, added: tuple[AddedToken, ...] = ()) -> Tokenizer:
    """All bytes but one (x), which is dropped, and a few words of them."""
    tokens = [*sorted(ALPHABET - {"x"}), "th", "the", "ĠĠ", "ĠĠĠĠ", "12", "Ãī"]
    merges = ["t h", "th e", "Ġ Ġ", "ĠĠ ĠĠ", "1 2", "Ã ī"]
    pre = PreTokenizer(pattern=r"\s+|\S+", normalizes_nfc=nfc)
    core = build_byte_level(Vocabulary(tokens, [TokenType.NORMAL] * len(tokens), "test"), merges, pre)
    core.add_tokens(list(added))
    return Tokenizer(core, SpecialTokens({}), ChatTemplates({}, "test"), "test")


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    swallowing = (AddedToken("<end>", rstrip=True, lstrip=True, normalized=False),)
    makers = {
        "bytes": byte_tokenizer,
        "byte level": byte_level,
        "nfc": lambda: byte_level(nfc=True),
        "swallowing": lambda: byte_level(added=swallowing),
        "sentencepiece": sentencepiece_tokenizer,
    }
    return makers[kind]()


KINDS = ["bytes", "byte level", "nfc", "swallowing", "sentencepiece"]
PIECES = [
    "the",
    "  ",
    "    ",
    "12",
    "1212",
    "7",
    "É",
    "E\u0301",
    "e",
    "\u0301",
    "\u212b",
    "한",
    "\u1112\u1161\u11ab",
    "<end>",
    "\u3000",
    "\x00",
    "🙂",
    "▁",
    "▁▁ ",
    " the",
    "xx",
    "txhe",
]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=30).map("".join))
def test_no_text_has_fewer_tokens_than_its_bound(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    assert tokenizer.length_bound.least(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("kind", KINDS)
def test_difficult_texts_keep_to_their_bound(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in TEXTS:
        assert tokenizer.length_bound.least(text * 50) <= len(tokenizer.encode(text * 50, add_special_tokens=False))


@pytest.mark.parametrize("kind", ["bytes", "byte level", "nfc", "swallowing"])
def test_digits_are_counted_as_they_are(kind: str) -> None:
    assert tokenizer_of(kind).length_bound.least("7" * 10_000) in (9_999, 10_000)
    assert tokenizer_of(kind).length_bound.least("") == 0


def test_sentencepiece_has_a_bound() -> None:
    assert tokenizer_of("sentencepiece").length_bound.least("7" * 10_000) > 1_000


def bound_of(core: Core) -> int:
    return LengthBound(core, lambda token: token.encode()).least("7" * 1000)


def test_nothing_is_said_of_tokenizers_that_may_drop_text() -> None:
    def core(vocab: dict[str, int] | None = None) -> Core:
        made = Core(models.BPE(vocab=vocab or {letter: i for i, letter in enumerate(ALPHABET)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        return made

    lowering, splitting, lacking = core(), core(), core({"a": 0})
    lowering.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])
    splitting.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("7", "removed"), splitting.pre_tokenizer])
    word_level = Core(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    assert [bound_of(made) for made in (lowering, splitting, lacking, word_level)] == [0, 0, 0, 0]
