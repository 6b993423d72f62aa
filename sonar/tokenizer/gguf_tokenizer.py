"""The tokenizer in a GGUF file's metadata. Called by `load_tokenizer`."""

from __future__ import annotations

import logging

from tokenizers import Tokenizer as Core

from sonar.config_fields import Fields
from sonar.errors import ModelError
from sonar.gguf_file import GGUFArray, GGUFFile
from sonar.tokenizer.chat_template import ChatTemplates
from sonar.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer, find_pre_tokenizer
from sonar.tokenizer.tokenizer import SpecialTokens, Tokenizer
from sonar.tokenizer.vocabulary import TokenType, Vocabulary, build_byte_level, build_sentencepiece

_logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_TEMPLATE_KEY = "tokenizer.chat_template"
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_CONTROL_KEYS = ("bos", "eos", "eot", "eom")
_PHI3_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


def load_gguf_tokenizer(file: GGUFFile, name: str) -> Tokenizer:
    """Build the tokenizer. name: the model's, for errors. Raises ModelError as `load_tokenizer`."""
    where = str(file.path)
    fields = Fields(file.metadata, where, _PREFIX)
    tokens = file.strings(f"{_PREFIX}tokens")
    vocabulary = Vocabulary(tokens, _read_types(file, fields, len(tokens)), where)
    kind = fields.get_str("model")
    if kind == "gpt2":
        pre = _read_pre_tokenizer(fields)
        core = build_byte_level(vocabulary, file.strings(f"{_PREFIX}merges"), pre)
        adds_bos = pre.adds_bos
    elif kind == "llama":
        core = _build_sentencepiece(file, fields, vocabulary)
        adds_bos = True
    else:
        raise ModelError(f"{where}: tokenizer {kind!r} is not supported; supported are gpt2, llama", param="model")
    special = _read_special(fields, vocabulary, adds_bos)
    return Tokenizer(core, special, ChatTemplates(_read_templates(file), name), name)


def _read_types(file: GGUFFile, fields: Fields, num_tokens: int) -> list[int]:
    """Token types; all normal where an old file has none. Ids named as begin or end are control tokens in any case:
    some files give them as normal ones, which would be cut to pieces in a chat's prompt and shown in its answer."""
    types = [int(TokenType.NORMAL)] * num_tokens
    if isinstance(file.metadata.get(f"{_PREFIX}token_type"), GGUFArray):
        types = [int(kind) for kind in file.numbers(f"{_PREFIX}token_type")]
    for key in _CONTROL_KEYS:
        index = fields.raw(f"{key}_token_id")
        if isinstance(index, int) and index < len(types):
            types[index] = int(TokenType.CONTROL)
    return types


def _read_pre_tokenizer(fields: Fields) -> PreTokenizer:
    """The rule the file names; GPT-2's for files from before there were names."""
    name = fields.get_str("pre", "default")
    if name == "default":
        _logger.warning(
            "%s names no pre-tokenizer: GPT-2's is used; if answers are poor, convert it anew", fields.where
        )
        return PRE_TOKENIZERS["gpt-2"]
    return find_pre_tokenizer(name, fields.where)


def _build_sentencepiece(file: GGUFFile, fields: Fields, vocabulary: Vocabulary) -> Core:
    right_stripping: set[str] = set()
    if file.metadata.get("general.architecture") == "phi3":  # not in the file; so are they in phi3's tokenizer.json
        special = (token for token, kind in zip(vocabulary.tokens, vocabulary.types) if kind == TokenType.CONTROL)
        right_stripping = {"</s>", *special} - set(_PHI3_NOT_STRIPPING)
    return build_sentencepiece(
        vocabulary,
        [float(score) for score in file.numbers(f"{_PREFIX}scores")],
        add_space_prefix=fields.get_bool("add_space_prefix", True),
        right_stripping=right_stripping,
    )


def _read_special(fields: Fields, vocabulary: Vocabulary, adds_bos: bool) -> SpecialTokens:
    """Named special tokens, and which of them go around a text. adds_bos: if the file does not say."""
    names: dict[str, str] = {}
    ids: dict[str, int] = {}
    for key, role in _ROLES.items():
        if fields.raw(f"{key}_token_id") is None:
            continue
        index = ids[key] = fields.get_int(f"{key}_token_id", low=0)
        if index >= len(vocabulary.tokens):
            raise fields.wrong(f"{key}_token_id", f"an id below {len(vocabulary.tokens)}")
        names[role] = vocabulary.tokens[index]
    has_prefix = fields.get_bool("add_bos_token", adds_bos) and "bos" in ids
    has_suffix = fields.get_bool("add_eos_token", False) and "eos" in ids
    return SpecialTokens(
        names,
        prefix_ids=(ids["bos"],) if has_prefix else (),
        suffix_ids=(ids["eos"],) if has_suffix else (),
    )


def _read_templates(file: GGUFFile) -> dict[str, str]:
    """`tokenizer.chat_template` is the default one; further ones have their name behind a dot."""
    templates = {}
    for key, value in file.metadata.items():
        if key.startswith(_TEMPLATE_KEY) and isinstance(value, str):
            templates[key.removeprefix(_TEMPLATE_KEY).removeprefix(".") or "default"] = value
    return templates
