"""Fetching a model from the Hugging Face hub, into that library's own cache.

Only the files that can be served are fetched. Knows nothing of local paths and aliases. Called by
`sonar.model_source`. Torch-free; the hub library is imported only when a hub id is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sonar.errors import ModelError
from sonar.packaged_model import Progress

_PATTERNS = ["*.json", "*.jinja", "*.model", "*.safetensors"]
_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights


def fetch_hub_model(
    repo_id: str, revision: str | None, progress: Progress, remedy: str, endpoint: str | None = None
) -> Path:
    """The folder of the hub model `repo_id`, downloaded unless this host has it.

    Args:
        revision: branch, tag or commit; None = the main branch.
        remedy: what can be given instead, for the error.
        endpoint: URL of another hub; None = the hub library's own setting.

    Raises:
        ModelError: no hub, no such model or revision, no access, or its weights are not in safetensors.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    phase = f"fetch {repo_id}"
    progress(phase, 0, 0)
    try:
        downloaded = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=_PATTERNS,
            ignore_patterns=_IGNORED,
            tqdm_class=_progress_bar(phase, progress),
            endpoint=endpoint,
        )
    except GatedRepoError as error:
        reason = "its owner restricts access: accept the terms on its page and log in with `hf auth login`"
        raise _unavailable(repo_id, reason, remedy) from error
    except RevisionNotFoundError as error:
        raise _unavailable(repo_id, f"it has no revision {revision!r}", remedy) from error
    except RepositoryNotFoundError as error:
        raise _unavailable(repo_id, "the hub has no such model, or it is private", remedy) from error
    except LocalEntryNotFoundError as error:
        raise _unavailable(repo_id, "it is not in this host's cache and the hub cannot be reached", remedy) from error
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        raise _unavailable(repo_id, f"{type(error).__name__}: {str(error).splitlines()[0]}", remedy) from error
    folder = Path(downloaded)
    if not any(folder.glob("*.safetensors")):
        reason = "the repository has no .safetensors file; other weight files are not read"
        raise _unavailable(repo_id, reason, remedy)
    return folder


def _unavailable(repo_id: str, reason: str, remedy: str) -> ModelError:
    text = (
        f"model {repo_id!r} is no file or folder here, and could not be fetched from the model hub: {reason}; {remedy}"
    )
    return ModelError(text, param="model")


def _progress_bar(phase: str, progress: Progress) -> Any:
    """A progress bar class, as the hub library takes one, that reports instead of drawing."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    most = 0

    class ReportingBar(tqdm):  # type: ignore[misc]
        """Draws nothing. The library makes one bar over files and two over bytes; the furthest of the latter counts."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self._counts_bytes = kwargs.get("unit") == "B"

        def update(self, n: float | None = 1) -> Any:
            nonlocal most
            self.n += n or 0  # a disabled bar does not count by itself
            if self._counts_bytes and self.n > most:
                most = int(self.n)
                progress(phase, most, int(self.total or 0))

    return ReportingBar
