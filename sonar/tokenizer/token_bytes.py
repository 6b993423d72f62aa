"""What each token stands for in bytes, read from a tokenizer's decoder.

Knows two kinds of decoder, those of all served families: byte-level BPE, whose tokens spell bytes in a 256-letter
alphabet, and SentencePiece, whose tokens are text with U+2581 for a space, or `<0x0A>` for one byte. Called by
`sonar.tokenizer.tokenizer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

from sonar.errors import ModelError

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    """How tokens become bytes.

    Attributes:
        convert: a token of the vocabulary (not an added one) -> its bytes.
        strip_left: spaces that the decoder removes from the beginning of a text, where the encoder put them.
        space: what the vocabulary writes for a space.
    """

    convert: Callable[[str], bytes]
    strip_left: int
    space: str


def read_decoder(core: tokenizers.Tokenizer, where: str) -> TokenBytes:
    """The rule of this tokenizer's decoder. where: the model, for the error.

    Raises:
        ModelError: a decoder of another kind; lists what is known.
    """
    steps = _flatten(json.loads(core.decoder.__getstate__())) if core.decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(_from_byte_level, strip_left=0, space="Ġ")
    if kinds == ["Metaspace"] and steps[0].get("replacement") == _SPACE_MARK:
        strips = steps[0].get("prepend_scheme", "always") != "never"
        return TokenBytes(_from_sentencepiece, strip_left=int(strips), space=_SPACE_MARK)
    if "Replace" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return TokenBytes(_from_sentencepiece, strip_left=_read_strip(steps, where), space=_SPACE_MARK)
    raise _unknown(" + ".join(kinds) or "none", where)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _read_strip(steps: list[dict[str, Any]], where: str) -> int:
    """Spaces stripped at the beginning; every step must do what SentencePiece's decoding needs."""
    strip_left = 0
    for step in steps:
        if step["type"] == "Replace" and (step["pattern"], step["content"]) != ({"String": _SPACE_MARK}, " "):
            raise _unknown(f"Replace of {step['pattern']} by {step['content']!r}", where)
        if step["type"] == "Strip":
            if step["content"] != " " or step["stop"]:
                raise _unknown(f"Strip of {step['content']!r}", where)
            strip_left += step["start"]
    return strip_left


def _unknown(found: str, where: str) -> ModelError:
    known = "ByteLevel, Metaspace, and SentencePiece's Replace + ByteFallback + Fuse + Strip"
    return ModelError(f"{where}: tokenizer decoder {found} is not supported; supported are {known}", param="model")


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 letters stand for themselves, the other bytes follow from U+0100 on."""
    letters = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in letters]
    return {chr(byte): byte for byte in letters} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_LETTERS = _byte_letters()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_LETTERS.__getitem__, token))
    except KeyError:  # no byte-level token but plain text, as padding entries of a vocabulary are
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(found[1])
    return token.replace(_SPACE_MARK, " ").encode()
