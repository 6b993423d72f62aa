"""The tokenizer of a Hugging Face folder: tokenizer.json, or a SentencePiece model where there is nothing else.

Called by `load_tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from sonar.errors import ModelError
from sonar.tokenizer.chat_template import ChatTemplates
from sonar.tokenizer.sentencepiece_file import SentencePieceFile
from sonar.tokenizer.tokenizer import SpecialTokens, Tokenizer
from sonar.tokenizer.vocabulary import build_sentencepiece

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_folder_tokenizer(folder: Path, name: str) -> Tokenizer:
    """Load the tokenizer in `folder`. name: the model's, for errors. Raises ModelError as `load_tokenizer`."""
    settings = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    names = {role: text for role in _ROLES if (text := _token_text(settings.get(role))) is not None}
    templates = ChatTemplates(_read_templates(folder, settings), name)
    if (folder / "tokenizer.json").is_file():
        return Tokenizer(_read_core(folder / "tokenizer.json"), SpecialTokens(names), templates, name)
    if (folder / "tokenizer.model").is_file():
        return _load_sentencepiece(folder / "tokenizer.model", settings, names, templates, name)
    raise ModelError(
        f"{folder} has neither tokenizer.json nor tokenizer.model; other tokenizers are not read: load it with "
        "transformers' AutoTokenizer and save_pretrained it into the folder",
        param="model",
    )


def _read_core(path: Path) -> Core:
    try:
        return Core.from_buffer(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}", param="model") from error
    except Exception as error:
        raise ModelError(f"{path} is damaged or of a newer format: {error}; fetch it again", param="model") from error


def _load_sentencepiece(
    path: Path, settings: Mapping[str, Any], names: Mapping[str, str], templates: ChatTemplates, name: str
) -> Tokenizer:
    """A SentencePiece model and what tokenizer_config.json adds to it; bos comes first unless that says otherwise."""
    model = SentencePieceFile(path)
    core = build_sentencepiece(model.vocabulary, model.scores, add_space_prefix=model.add_space_prefix)
    for index, entry in sorted(_added_tokens(settings).items()):
        if core.token_to_id(entry["content"]) is None and index == core.get_vocab_size():
            flags = {key: bool(entry.get(key)) for key in ("special", "lstrip", "rstrip", "single_word")}
            core.add_tokens([AddedToken(entry["content"], normalized=False, **flags)])
    names = {**model.special_names, **names}
    bos, eos = core.token_to_id(names.get("bos_token", "")), core.token_to_id(names.get("eos_token", ""))
    special = SpecialTokens(
        names,
        prefix_ids=(bos,) if bos is not None and settings.get("add_bos_token", True) else (),
        suffix_ids=(eos,) if eos is not None and settings.get("add_eos_token", False) else (),
    )
    return Tokenizer(core, special, templates, name)


def _added_tokens(settings: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Tokens beyond the SentencePiece model, by id."""
    entries = settings.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return {}
    return {
        int(index): entry
        for index, entry in entries.items()
        if index.isdigit() and isinstance(entry, dict) and isinstance(entry.get("content"), str)
    }


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; files of their own take precedence over tokenizer_config.json."""
    written = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(written, str):
        templates["default"] = written
    elif isinstance(written, list):
        templates = {
            str(entry["name"]): str(entry["template"])
            for entry in written
            if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
        }
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


def _token_text(value: Any) -> str | None:
    """A special token is written as a string, or as an object with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """An object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged ({error}); fetch it again", param="model") from error
    return values if isinstance(values, dict) else {}
