"""How many tokens a text has at least, told from its bytes alone: so that one which cannot fit is never tokenized.

Each byte b weighs 1 / (bytes of the longest token that holds b). The bytes of one token then weigh 1 at most together,
so a text has at least as many tokens as its bytes weigh. That holds only where each byte of a text ends up in a token:
tokenizers that drop, shorten or fuse text get no bound (0), see `_weights`. Called by `sonar.tokenizer.tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

# Bytes that UTF-8 never uses: no token need stand for them.
_NEVER = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
_SPACE_MARK = "▁".encode()
_ASCII_SPACES = (*range(0x09, 0x0E), *range(0x1C, 0x21))
# Pre-tokenizers that cut a text and drop nothing of it.
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "Split")
# Below any error of summing some millions of floats.
_ROUNDING = 1e-9


class LengthBound:
    """The bound of one tokenizer.

    Args:
        core: the tokenizer.
        convert: a token of its vocabulary (not an added one) -> its bytes.
    """

    def __init__(self, core: tokenizers.Tokenizer, convert: Callable[[str], bytes]) -> None:
        config = json.loads(core.to_str())
        steps = list(_steps(config.get("normalizer"), "normalizers"))
        self._composes = any(step["type"] == "NFC" for step in steps)
        self._weights = _weights(core, convert, config, steps)

    def least(self, text: str) -> int:
        """A number of tokens that no encoding of the text stays below; 0 where nothing can be said."""
        if self._weights is None:
            return 0
        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        counts = np.bincount(data, minlength=256)
        weight = float(counts @ self._weights) * (1 - _ROUNDING)
        if self._composes:
            # A composed character takes one ASCII character in, and each of them has a mark beyond ASCII.
            weight -= len(text) - int(counts[:0x80].sum())
        return max(0, int(weight))


def _weights(
    core: tokenizers.Tokenizer,
    convert: Callable[[str], bytes],
    config: dict[str, Any],
    normalizers: list[dict[str, Any]],
) -> npt.NDArray[np.float64] | None:
    """A weight for each byte value; None when text may vanish into nothing or into one token for anything unknown."""
    is_byte_level = (config["decoder"] or {}).get("type") == "ByteLevel"
    if not _keeps_all_text(config, normalizers, is_byte_level):
        return None
    longest = np.zeros(256, np.int64)
    alone: set[int] = set()
    added = config["added_tokens"]
    plain = core.get_vocab(with_added_tokens=False).keys() - {token["content"] for token in added}
    for data in (*map(convert, plain), *(token["content"].encode() for token in added)):
        spellings = (data,) if is_byte_level else _spellings(data)
        values = list(set(b"".join(spellings)))
        longest[values] = np.maximum(longest[values], max(map(len, spellings)))
        if len(data) == 1:
            alone.add(data[0])
    weights = 1.0 / np.maximum(longest, 1)
    lacking = set(range(256)) - alone - _NEVER
    if lacking and not is_byte_level:
        return None  # a whole run of characters may become one unknown token
    weights[list(lacking)] = 0  # dropped, byte by byte
    if any(token["lstrip"] or token["rstrip"] for token in added):
        # They swallow white space of any length; what lies beyond ASCII may be some.
        weights[list(_ASCII_SPACES)] = 0
        weights[0x80:] = 0
    if any(step["type"] == "NFC" for step in normalizers):
        weights[0x80:] = 0  # marks vanish into the character before them
    return weights


def _spellings(data: bytes) -> tuple[bytes, bytes]:
    """A SentencePiece token with spaces and with the marks that stand for them, which a text may hold itself."""
    return data.replace(_SPACE_MARK, b" "), data.replace(b" ", _SPACE_MARK)


def _keeps_all_text(config: dict[str, Any], normalizers: list[dict[str, Any]], is_byte_level: bool) -> bool:
    """Whether each byte of a text comes to the model, which has a token for it or tokens for its bytes."""
    cuts = list(_steps(config.get("pre_tokenizer"), "pretokenizers"))
    model = config["model"]
    return (
        model["type"] == "BPE"
        and all(map(_keeps, normalizers))
        and all(cut["type"] in _KEEPING and cut.get("behavior") != "Removed" for cut in cuts)
        and (any(cut["type"] == "ByteLevel" for cut in cuts) if is_byte_level else bool(model.get("byte_fallback")))
    )


def _keeps(normalizer: dict[str, Any]) -> bool:
    """Whether a normalizer leaves each byte in place, but for what `LengthBound.least` allows for."""
    if normalizer["type"] == "Replace":
        return (normalizer["pattern"], normalizer["content"]) == ({"String": " "}, "▁")
    return normalizer["type"] in ("NFC", "Prepend")


def _steps(part: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """The parts of a sequence, however deep; a part that is none is its only one."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part[key]:
        yield from _steps(inner, key)
