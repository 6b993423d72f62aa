"""`sonar version`: the versions a bug report needs, from package metadata; imports none of the packages."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Mapping

from sonar import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "msgspec", "pyzmq", "fastapi", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags of its own."""


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints a line a component; a missing one says so."""
    print(f"sonar {__version__}")
    print(f"python {platform.python_version()}")
    print(f"platform {platform.platform()} {platform.machine()}")
    for name in PACKAGES:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} missing")
    return 0
