"""A vocabulary as GGUF files and SentencePiece models hold it -> a `tokenizers.Tokenizer`.

Two kinds: byte-level BPE with merges, and SentencePiece BPE, where scores take the merges' place. Knows nothing of
files. Called by `gguf_tokenizer` and `folder_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from sonar.errors import ModelError
from sonar.tokenizer.pre_tokenizers import PreTokenizer

_SPACE_MARK = "▁"


class TokenType(IntEnum):
    """What a vocabulary's entry is; GGUF and SentencePiece number them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Entries by id. types: of `TokenType`, as long as tokens. where: the file, for errors."""

    tokens: Sequence[str]
    types: Sequence[int]
    where: str

    def __post_init__(self) -> None:
        if not self.tokens or len(self.types) != len(self.tokens):
            raise ModelError(
                f"{self.where}: the tokenizer has {len(self.tokens)} tokens and {len(self.types)} token types",
                param="model",
            )


def build_byte_level(vocabulary: Vocabulary, merges: Sequence[str], pre: PreTokenizer) -> Tokenizer:
    """A byte-level BPE tokenizer. merges: "left right", the first one merged first.

    Raises:
        ModelError: a merge is no pair of tokens.
    """
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    core = Tokenizer(_build_bpe(vocabulary.where, vocab, pairs, ignore_merges=pre.ignore_merges))
    if pre.normalizes_nfc:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre.build()
    core.decoder = decoders.ByteLevel()
    _add_tokens(core, vocabulary)
    return core


def build_sentencepiece(
    vocabulary: Vocabulary,
    scores: Sequence[float],
    *,
    add_space_prefix: bool,
    right_stripping: Collection[str] = (),
) -> Tokenizer:
    """A SentencePiece BPE tokenizer with byte fallback.

    Args:
        scores: by id; of two possible merges that of the higher score comes first.
        add_space_prefix: put a space before a text, so that its first word is spelled as the others are.
        right_stripping: special tokens that swallow the white space after them.

    Raises:
        ModelError: scores and tokens differ in number.
    """
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(
            f"{vocabulary.where}: the tokenizer has {len(vocabulary.tokens)} tokens and {len(scores)} scores",
            param="model",
        )
    tokens = vocabulary.tokens
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, vocabulary.types) if kind == TokenType.UNKNOWN), None)
    pairs = _merges_of_scores(vocabulary, scores)
    core = Tokenizer(_build_bpe(vocabulary.where, vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE_MARK)] if add_space_prefix else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])
    strip = [decoders.Strip(content=" ", left=1)] if add_space_prefix else []
    core.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_tokens(core, vocabulary, right_stripping)
    return core


def _build_bpe(where: str, vocab: dict[str, int], pairs: list[tuple[str, str]], **options: object) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=pairs, **options)
    except Exception as error:
        raise ModelError(f"{where}: the tokenizer's merges do not fit its tokens: {error}", param="model") from error


def _merges_of_scores(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best score first.

    SentencePiece looks at a pair's joined score when it merges, so all pairs that join to one token rank alike.
    """
    tokens, types = vocabulary.tokens, vocabulary.types
    parts = {token for token, kind in zip(tokens, types) if kind == TokenType.NORMAL}
    order = sorted((i for i in range(len(tokens)) if types[i] == TokenType.NORMAL), key=lambda i: -scores[i])
    pairs = []
    for index in order:
        token = tokens[index]
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in parts:
                right = token[cut:]
                if right in parts:
                    pairs.append((left, right))
    return pairs


def _add_tokens(core: Tokenizer, vocabulary: Vocabulary, right_stripping: Collection[str] = ()) -> None:
    """Tokens that are matched in the raw text, before anything else is done to it."""
    special, plain = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) and token:
            special.append(AddedToken(token, normalized=False, rstrip=token in right_stripping))
        elif kind == TokenType.USER_DEFINED and token:
            plain.append(AddedToken(token, normalized=False))
    core.add_special_tokens(special)
    core.add_tokens(plain)
