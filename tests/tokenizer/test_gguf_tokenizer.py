"""Tokenizers out of GGUF files: the demo model against golden ids, other kinds from small files, named errors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sonar.errors import ModelError
from sonar.gguf_file import GGUFFile
from sonar.model_source import resolve_model
from sonar.tokenizer import Tokenizer, load_tokenizer
from sonar.tokenizer.gguf_tokenizer import load_gguf_tokenizer
from sonar.tokenizer.pre_tokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from sonar.tokenizer.sentencepiece_file import SentencePieceFile
from tests.gguf_writing import write_gguf
from tests.tokenizer.cases import DATA, TEXTS

LACKING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
GOLDEN = json.loads((DATA / "golden_smollm2.json").read_text())


def test_demo_facts(demo: Tokenizer) -> None:
    assert demo.encode("x   12") == [104, 333, 33, 34], "digits are split one by one"
    assert (demo.vocab_size, demo.bos_token_id, demo.eos_token_id) == (49152, 1, 2)
    assert demo.encode("Hi", add_special_tokens=True) == demo.encode("Hi", add_special_tokens=False)
    assert demo.encode("<|im_start|>user") == [1, *demo.encode("user")]
    assert demo.special_ids == frozenset(range(17))


@pytest.mark.parametrize("name", GOLDEN["completion"])
def test_golden_completions(demo: Tokenizer, name: str) -> None:
    case = GOLDEN["completion"][name]
    assert demo.encode(case["prompt"]) == case["prompt_token_ids"]
    assert demo.decode(case["output_token_ids"]) == case["output_text"]


@pytest.mark.parametrize("name", GOLDEN["chat"])
def test_golden_chats(demo: Tokenizer, name: str) -> None:
    case = GOLDEN["chat"][name]
    prompt = demo.apply_chat_template([{"role": "user", "content": case["user"]}])
    assert demo.encode(prompt, add_special_tokens=False) == case["prompt_token_ids"]


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back(demo: Tokenizer, text: str) -> None:
    """Without the few bytes (control characters, private planes) that this vocabulary lacks and drops."""
    assume(not LACKING & set(text.encode()))
    assert demo.decode(demo.encode(text), skip_special_tokens=False) == text


def _write(path: Path, tokens: list[str], types: list[int], **entries: Any) -> Path:
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None}
    return write_gguf(path / "tokenizer.gguf", "llama", metadata, {})


def _letters(pre: str | None, path: Path, **entries: Any) -> Tokenizer:
    """A byte-level tokenizer of single letters, digits and a few merges."""
    tokens = [*"abcdefghijklmnopqrstuvwxyz0123456789!Ġ'", "Ã", "©", "Ì", "ģ", "Ã©", "12", "123", "<s>", "<tool>"]
    types = [1] * (len(tokens) - 2) + [3, 4]
    merges = ["1 2", "12 3", "Ã ©"]
    entries = {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("<s>"), **entries}
    file = _write(path, tokens, types, model="gpt2", pre=pre, merges=merges, **entries)
    return load_gguf_tokenizer(GGUFFile(file), "letters")


def _spelled(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[str]:
    return [str(tokenizer.core.id_to_token(i)) for i in tokenizer.encode(text, add_special_tokens=add_special_tokens)]


@pytest.mark.parametrize(
    ("pre", "digits"),
    [("gpt-2", ["123", "12"]), ("smollm", list("12312")), ("llama-bpe", ["123", "12"]), ("qwen2", list("12312"))],
)
def test_digits_by_pre_tokenizer(pre: str, digits: list[str], tmp_path: Path) -> None:
    assert _spelled(_letters(pre, tmp_path), "12312") == digits


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    assert _spelled(_letters("qwen2", tmp_path), "e\u0301") == ["Ã©"]
    assert _spelled(_letters("llama-bpe", tmp_path), "e\u0301") == ["e", "Ì", "ģ"]


def test_llama3_takes_whole_tokens_whatever_the_merges_say(tmp_path: Path) -> None:
    """Its vocabulary holds words that its merges do not reach."""
    tokens = ["a", "b", "c", "abc", "Ġ", "Ġa"]
    for pre, expected in (("llama-bpe", ["abc"]), ("gpt-2", ["a", "b", "c"])):
        file = _write(tmp_path, tokens, [1] * 6, model="gpt2", pre=pre, merges=["Ġ a"])
        assert _spelled(load_gguf_tokenizer(GGUFFile(file), "x"), "abc") == expected


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_rule_keeps_every_character(name: str) -> None:
    rule = PRE_TOKENIZERS[name].build()
    for text in TEXTS:
        spans = [span for _, span in rule.pre_tokenize_str(text)]
        assert "".join(text[start:end] for start, end in spans) == text


def test_words_of_tekken_and_gpt4o() -> None:
    text = "CamelCase don't 1234"

    def words(name: str) -> list[str]:
        return [text[start:end] for _, (start, end) in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]

    assert words("tekken") == ["Camel", "Case", " don", "'t", " ", "1", "2", "3", "4"]
    assert words("gpt-4o") == ["Camel", "Case", " don't", " ", "123", "4"]
    assert words("llama-bpe") == ["CamelCase", " don", "'t", " ", "123", "4"]


def test_beginning_and_end_tokens_by_the_files_rules(tmp_path: Path) -> None:
    def added(pre: str, **entries: Any) -> list[str]:
        return _spelled(_letters(pre, tmp_path, **entries), "a", add_special_tokens=True)

    assert added("llama-bpe") == ["<s>", "a"], "Llama 3 begins with bos even if a file does not say so"
    assert added("llama-bpe", add_bos_token=False) == ["a"]
    assert added("qwen2") == ["a"]
    assert added("qwen2", add_bos_token=True, add_eos_token=True) == ["<s>", "a", "<s>"]


def test_named_ends_are_special_whatever_their_type(tmp_path: Path) -> None:
    tokens = ["a", "b", "<eos>", "ab"]
    file = _write(tmp_path, tokens, [1] * 4, model="gpt2", pre="gpt-2", merges=["a b"], eos_token_id=2)
    tokenizer = load_gguf_tokenizer(GGUFFile(file), "x")
    assert _spelled(tokenizer, "ab<eos>a") == ["ab", "<eos>", "a"]
    assert tokenizer.decode([3, 2]) == "ab"


def test_user_defined_tokens_are_matched_and_not_special(tmp_path: Path) -> None:
    tokenizer = _letters("gpt-2", tmp_path)
    ids = tokenizer.encode("a<tool>b")
    assert _spelled(tokenizer, "a<tool>b") == ["a", "<tool>", "b"]
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(tokenizer.encode("a<s>b")) == "ab"


def test_a_file_without_a_pre_tokenizer_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _spelled(_letters(None, tmp_path), "12312") == ["123", "12"]
    assert "names no pre-tokenizer" in caplog.text


def test_sentencepiece_from_gguf(tmp_path: Path, pieces: Tokenizer) -> None:
    model = SentencePieceFile(DATA / "tiny_sentencepiece.model")
    tokens, types = list(model.vocabulary.tokens), [int(kind) for kind in model.vocabulary.types]
    entries = {"model": "llama", "scores": model.scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    tokenizer = load_gguf_tokenizer(GGUFFile(_write(tmp_path, tokens, types, **entries)), "sp")
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *pieces.encode(text, add_special_tokens=False)]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    plain = load_gguf_tokenizer(GGUFFile(_write(tmp_path, tokens, types, **entries, add_space_prefix=False)), "sp")
    assert plain.encode(" x", add_special_tokens=False) == pieces.encode("x", add_special_tokens=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "rwkv"}, r"tokenizer 'rwkv' is not supported; supported are gpt2, llama"),
        ({"model": None}, r"'tokenizer\.ggml\.model' is missing"),
        ({"pre": "no-such-rule"}, r"pre-tokenizer 'no-such-rule' is not supported; supported are gpt-2"),
        ({"merges": ["a zz"]}, r"merges do not fit"),
        ({"merges": None}, r"'tokenizer\.ggml\.merges' is missing"),
        ({"token_type": [1]}, r"3 tokens and 1 token types"),
        ({"bos_token_id": 9}, r"'tokenizer\.ggml\.bos_token_id' is '9'; needed is an id below 3"),
        ({"model": "llama", "scores": [1.0]}, r"3 tokens and 1 scores"),
        ({"model": "llama"}, r"'tokenizer\.ggml\.scores' is missing"),
        ({"tokens": None}, r"'tokenizer\.ggml\.tokens' is missing"),
    ],
)
def test_refusals(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    entries = {"tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "model": "gpt2", "pre": "gpt-2", "merges": ["a b"]}
    values = {f"tokenizer.ggml.{k}": v for k, v in {**entries, **change}.items() if v is not None}
    path = write_gguf(tmp_path / "t.gguf", "llama", values, {})
    with pytest.raises(ModelError, match=message) as raised:
        load_tokenizer(resolve_model(str(path)))
    assert "t.gguf" in raised.value.message


def test_unknown_rule_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"smollm.*qwen2"):
        find_pre_tokenizer("x", "file")
