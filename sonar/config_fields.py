"""Typed access to the fields of a model's own configuration: a missing or ill-typed field is a named error.

Called by the readers of config.json, generation_config.json and GGUF metadata. Torch-free.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from sonar.errors import ModelError

MAX_LAYERS = 10_000
"""Far beyond any model; a limit for `get_int`."""

_MISSING: Any = object()


class Fields:
    """A mapping read from a file. where: the file, for errors. prefix: put before every name (GGUF's architecture).

    Getters take a default for a field that is absent or null, and raise `ModelError` naming file, field and value if
    there is none or the value is of another type.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def raw(self, name: str) -> Any:
        """The value, or None."""
        return self.values.get(self.prefix + name)

    def wrong(self, name: str, wanted: str) -> ModelError:
        """The error for a field that is not what is wanted."""
        value = self.raw(name)
        found = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return ModelError(f"{self.where}: field {self.prefix + name!r} {found}; needed is {wanted}", param="model")

    def get_int(self, name: str, default: Any = _MISSING, low: int = 1, high: int = 2**31) -> int:
        """An integer in [low, high]; the upper limit keeps a damaged file from asking for all memory."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def get_float(self, name: str, default: Any = _MISSING) -> float:
        """A finite number."""
        value = self._get(name, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
            return float(value)
        raise self.wrong(name, "a finite number")

    def get_bool(self, name: str, default: Any = _MISSING) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def get_str(self, name: str, default: Any = _MISSING) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def nested(self, name: str) -> Fields:
        """An object within this one; an empty one if it is absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.where}, {name}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        return default if value is None and default is not _MISSING else value
