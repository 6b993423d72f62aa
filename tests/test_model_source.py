"""Finding models by folder, file, alias and hub id, and what a user is told when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sonar.errors import ModelError
from sonar.model_source import ModelKind, ModelSource, default_cache_dir, resolve_model


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(bytes(100))
    return path


def test_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "tiny")
    source = resolve_model(str(folder))
    assert (source.kind, source.path, source.name) == (ModelKind.FOLDER, folder, "tiny")


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _folder(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("tiny", "./tiny", "~/tiny"):
        assert resolve_model(name).path == folder


def test_gguf_file_and_the_folder_that_holds_it(tmp_path: Path) -> None:
    file = tmp_path / "some-model.Q8_0.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    source = resolve_model(str(file))
    assert (source.kind, source.path, source.name) == (ModelKind.GGUF, file, "some-model.Q8_0")
    assert resolve_model(str(tmp_path)) == source
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files"):
        resolve_model(str(tmp_path))


def test_link_keeps_its_name(tmp_path: Path) -> None:
    """The hub library's folders are links to files without a suffix."""
    (tmp_path / "0123abcd").write_bytes(b"GGUF" + bytes(100))
    link = tmp_path / "model.gguf"
    link.symlink_to(tmp_path / "0123abcd")
    assert resolve_model(str(link)).path == link
    assert resolve_model(str(tmp_path)).path == link


def test_alias(smollm2: ModelSource) -> None:
    assert (smollm2.kind, smollm2.name) == (ModelKind.GGUF, "smollm2-135m")
    assert resolve_model("smollm2-135m") == smollm2


@pytest.mark.parametrize(
    "name", ["no-such-model", "./missing", "missing.gguf", "owner/missing.gguf", "a b/c", "", "x" * 5000]
)
def test_what_is_nothing_names_the_ways_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelError, match=r"give a Hugging Face folder, a \.gguf file, a hub id .* smollm2-135m"
    ) as raised:
        resolve_model(name)
    assert raised.value.param == "model"
    assert len(raised.value.message) < 600


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_revision_without_a_hub_is_refused(tmp_path: Path) -> None:
    for name in (str(_folder(tmp_path / "tiny")), "smollm2-135m"):
        with pytest.raises(ModelError, match="leave it out") as raised:
            resolve_model(name, revision="main", cache_dir=tmp_path)
        assert raised.value.param == "revision"


def test_identity_is_of_the_content_not_the_place(tmp_path: Path) -> None:
    one, two = (resolve_model(str(_folder(tmp_path / name))) for name in ("one", "two"))
    assert one.identity == two.identity
    for change in ("config.json", "model.safetensors", "tokenizer.json"):
        before = resolve_model(str(two.path)).identity
        with (two.path / change).open("ab") as file:
            file.write(b" ")
        assert resolve_model(str(two.path)).identity != before
    (two.path / "notes.txt").write_text("of no consequence")
    assert resolve_model(str(two.path)).identity != one.identity


def test_identity_of_a_file_sees_its_size_beginning_and_end(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    seen = set()
    for content in (b"GGUFa" + bytes(9 << 20), b"GGUFb" + bytes(9 << 20), b"GGUFa" + bytes((9 << 20) + 1)):
        file.write_bytes(content)
        seen.add(resolve_model(str(file)).identity)
    file.write_bytes(b"GGUFa" + bytes((9 << 20) - 1) + b"z")
    seen.add(resolve_model(str(file)).identity)
    assert len(seen) == 4


def test_default_cache_dir() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/sonar")
    for unusable in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert default_cache_dir(unusable) == Path.home() / ".cache" / "sonar"
    assert default_cache_dir() == default_cache_dir(os.environ)


def test_imports_no_torch_and_no_hub_library() -> None:
    code = "import sonar.model_source, sonar.model_config, sys; print({'torch', 'huggingface_hub'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
