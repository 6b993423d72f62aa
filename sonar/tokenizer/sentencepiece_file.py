"""Reading a SentencePiece model file (`tokenizer.model`) without the SentencePiece library.

Format: the `ModelProto` message of sentencepiece_model.proto in protocol buffers' wire encoding; only the fields below
are looked at. Called by `folder_tokenizer`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from sonar.errors import ModelError
from sonar.tokenizer.vocabulary import TokenType, Vocabulary

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of ModelProto
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_TRAINER_KIND, _KIND_BPE = 3, 2
_CHAR_MAP, _ADD_SPACE_PREFIX, _REMOVE_SPACES = 2, 3, 4  # fields of NormalizerSpec
_ROLES = {"<s>": "bos_token", "</s>": "eos_token", "<unk>": "unk_token", "<bos>": "bos_token", "<eos>": "eos_token"}

_Value = int | bytes


class SentencePieceFile:
    """A model of kind BPE without text normalization, as Llama 2, Mistral and Gemma have.

    Attributes:
        scores: by id. add_space_prefix: a space is put before a text. special_names: role -> token.

    Raises:
        ModelError: cut short or damaged, or of another kind.
    """

    def __init__(self, path: Path) -> None:
        tokens, types, self.scores = [], [], []
        self.add_space_prefix, kind, normalizes = True, 1, False
        try:
            for field, value in _read_message(path.read_bytes()):
                if field == _PIECES:
                    piece = dict(_read_message(value))
                    tokens.append(str(_as_bytes(piece.get(_PIECE_TEXT, b"")), "utf-8"))
                    self.scores.append(struct.unpack("<f", _as_bytes(piece.get(_PIECE_SCORE, bytes(4))))[0])
                    types.append(int(piece.get(_PIECE_TYPE, TokenType.NORMAL)))
                elif field == _TRAINER:
                    kind = int(dict(_read_message(value)).get(_TRAINER_KIND, kind))
                elif field == _NORMALIZER:
                    spec = dict(_read_message(value))
                    self.add_space_prefix = bool(spec.get(_ADD_SPACE_PREFIX, 1))
                    normalizes = bool(spec.get(_CHAR_MAP)) or bool(spec.get(_REMOVE_SPACES, 1))
        except (OSError, IndexError, ValueError, TypeError, struct.error) as error:
            raise ModelError(f"{path} is damaged or no SentencePiece model ({error})", param="model") from error
        if kind != _KIND_BPE or normalizes:
            raise ModelError(
                f"{path} is no SentencePiece model of kind BPE, or one that normalizes text: not supported; "
                "load it with transformers' AutoTokenizer and save_pretrained it into the folder",
                param="model",
            )
        self.vocabulary = Vocabulary(tokens, types, str(path))
        self.special_names = {_ROLES[token]: token for token in tokens[:8] if token in _ROLES}


def _read_message(data: _Value) -> Iterator[tuple[int, _Value]]:
    """The fields of an encoded message: (number, value); 32- and 64-bit values as bytes."""
    data, position = _as_bytes(data), 0
    while position < len(data):
        key, position = _read_varint(data, position)
        value: _Value
        match key & 7:
            case 0:
                value, position = _read_varint(data, position)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, position = _read_varint(data, position)
            case 5:
                size = 4
            case wire:
                raise ValueError(f"unknown wire type {wire}")
        if size > len(data) - position:
            raise ValueError("it ends within a field")
        yield key >> 3, data[position : position + size]
        position += size


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """An integer in groups of seven bits, lowest first; returns it and the position behind it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("an integer of more than ten bytes")


def _as_bytes(value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where text is expected")
    return value
