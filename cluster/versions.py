"""Versions that two hosts of one cluster compare. Reads package metadata; imports none of the packages."""

from __future__ import annotations

import importlib.metadata
import platform

import sonar

# Its wheels; a torch built against the system's own NCCL has neither.
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def installed_versions() -> dict[str, str]:
    """Package -> version; "" for one that is not installed."""
    versions = {"sonar": sonar.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "pyzmq", "msgspec", "nixl-cu13", "nixl-cu12", *NCCL):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return versions
