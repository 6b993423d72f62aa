"""Tokenizers of Hugging Face folders: tokenizer.json with its settings and templates, and bare SentencePiece models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from sonar.errors import ModelError
from sonar.model_source import resolve_model
from sonar.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import make_tiny_tokenizer
from tests.tokenizer.cases import DATA, TEXTS, sentencepiece_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    make_tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def _load(folder: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(folder)))


def _set(folder: Path, **settings: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_agrees_with_transformers(folder: Path) -> None:
    mine, reference = _load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert mine.encode(text) == reference(text).input_ids
        assert mine.decode(mine.encode(text)) == text
    assert (mine.bos_token_id, mine.eos_token_id) == (0, 2)
    chat = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert mine.apply_chat_template(chat) == reference.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


def test_post_processor_of_tokenizer_json_counts(folder: Path) -> None:
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    core.enable_truncation(4)
    core.enable_padding(length=64)
    core.save(str(folder / "tokenizer.json"))
    mine = _load(folder)
    assert mine.encode("Hello") == [0, *mine.encode("Hello", add_special_tokens=False)]
    assert len(mine.encode("Hello")) == 6, "neither cut nor padded"


def test_where_templates_are_found(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    _set(folder, chat_template="from settings")
    assert _load(folder).apply_chat_template(MESSAGES) == "from settings"
    named = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "tools"}]
    _set(folder, chat_template=named)
    assert _load(folder).apply_chat_template(MESSAGES) == "default"
    assert _load(folder).apply_chat_template(MESSAGES, tools=[{"type": "function"}]) == "tools"
    _set(folder, chat_template=None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert _load(folder).apply_chat_template(MESSAGES) == "from json"
    (folder / "chat_template.jinja").write_text("from file")
    assert _load(folder).apply_chat_template(MESSAGES) == "from file"


def test_special_tokens_as_strings_and_objects(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}")
    _set(folder, bos_token={"content": "<|im_start|>", "lstrip": False}, eos_token="<|im_end|>", unk_token=None)
    tokenizer = _load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.apply_chat_template(MESSAGES) == "<|im_start|>|<|im_end|>|False"


def test_bare_sentencepiece_model(tmp_path: Path) -> None:
    """Ids as the SentencePiece library gives them."""
    (tmp_path / "config.json").write_text("{}")
    shutil.copyfile(DATA / "tiny_sentencepiece.model", tmp_path / "tokenizer.model")
    tokenizer = _load(tmp_path)
    for case in json.loads((DATA / "tiny_sentencepiece.json").read_text()):
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("Hello")[0] == 1
    added = {"600": {"content": "<|user|>", "special": True}, "7": {"content": "<0x03>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "added_tokens_decoder": added}))
    tokenizer = _load(tmp_path)
    assert tokenizer.encode("<|user|>") == [600]
    assert 600 in tokenizer.special_ids


def test_no_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"neither tokenizer\.json nor tokenizer\.model.*save_pretrained"):
        _load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b'{"model": {"type": "Nonsense"}}'])
def test_damaged_tokenizer_json(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        _load(folder)


def test_damaged_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is damaged"):
        _load(folder)


def test_damaged_sentencepiece_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    data = (DATA / "tiny_sentencepiece.model").read_bytes()
    for content in (b"\xff" * 30, data[:-1], data[:1000], b"not protocol buffers at all"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelError, match=r"tokenizer\.model"):
            _load(tmp_path)


def test_decoders_of_other_kinds_are_refused(folder: Path) -> None:
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for decoder in (tokenizers.decoders.WordPiece(), tokenizers.decoders.CTC(), tokenizers.decoders.Replace("x", "y")):
        core.decoder = decoder
        core.save(str(folder / "tokenizer.json"))
        with pytest.raises(ModelError, match=r"decoder .* is not supported; supported are ByteLevel"):
            _load(folder)


def test_metaspace_decoder_is_sentencepiece(folder: Path) -> None:
    core = sentencepiece_tokenizer().core
    core.normalizer = None
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first", split=False)
    core.save(str(folder / "tokenizer.json"))
    tokenizer = _load(folder)
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"
    assert tokenizer.decode(tokenizer.encode("Hello world"), after_text=True) == " Hello world"


def test_loading_imports_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from sonar.model_source import resolve_model; from sonar.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(resolve_model({str(folder)!r}))\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}])\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
