"""Reading one table of a TOML file into one frozen dataclass, with errors that a person can act on.

Every error names the file, the key with its table, the value, and what may stand there; a misspelt key is answered with
the nearest known one. Knows types only: what the settings mean is `cluster.cluster_file`'s, its only caller.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from sonar.errors import ConfigError

T = TypeVar("T")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class Table:
    """One table of the file.

    Args:
        where: its header as the user wrote it, e.g. "[network]"; empty for the top level.
    """

    def __init__(self, file: Path, where: str, values: Mapping[str, Any]) -> None:
        self._file = file
        self._where = where
        self._values = dict(values)

    def check_keys(self, known: Iterable[str]) -> None:
        """Raises `ConfigError` for the first key that is none of these."""
        names = sorted(known)
        for key in self._values:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
                remedy = f"did you mean {near[0]}?" if near else f"known here: {', '.join(names)}"
                self.fail(key, f"is no key of {self._where or 'a cluster file'}; {remedy}")

    def table(self, key: str) -> Table:
        """A table inside this one; an absent one is empty."""
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, "is a value; write a table [" + key + "]")
        return Table(self._file, f"{self._where.rstrip(']')}.{key}]" if self._where else f"[{key}]", value)

    def tables(self, key: str) -> list[Table]:
        """The tables written as [[key]]."""
        value = self._values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.fail(key, f"is no list of tables; write [[{key}]] once for each")
        names = [str(item.get("name", number)) for number, item in enumerate(value, 1)]
        return [Table(self._file, f"[[{key}]] {name}", item) for name, item in zip(names, value)]

    def has(self, key: str) -> bool:
        """Whether the file gives that key."""
        return key in self._values

    def get(self, key: str, kind: Any, default: Any) -> Any:
        """A value of a type (str, int, float, bool, Path, a Literal, tuple[str, ...], or one of these or None)."""
        if key not in self._values:
            return default
        return self._convert(key, self._values[key], kind)

    def build(self, cls: type[T], known: Mapping[str, str] | None = None, **fixed: Any) -> T:
        """The dataclass from the keys that are there; the others keep its defaults.

        Args:
            known: key -> field; None = every field of the class under its own name, but those in `fixed`.
            fixed: fields that are given by the caller.
        """
        hints = typing.get_type_hints(cls)
        fields = known
        if fields is None:
            assert dataclasses.is_dataclass(cls)
            fields = {field.name: field.name for field in dataclasses.fields(cls) if field.name not in fixed}
            self.check_keys(fields)
        present = {
            field: self._convert(key, self._values[key], hints[field])
            for key, field in fields.items()
            if key in self._values
        }
        try:
            return cls(**present, **fixed)
        except ConfigError as error:
            keys = {field: key for key, field in fields.items()}
            key = keys.get(error.param or "", error.param or "")
            text = error.message if key == error.param else f"{key}: {error.message}"
            raise ConfigError(f"{self._file}: {self._where} {text}".replace(":  ", ": "), param=key) from error

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raises `ConfigError` about a key."""
        place = f"{self._where} " if self._where else ""
        value = f" = {_short(self._values[key])}" if key in self._values else ""
        raise ConfigError(f"{self._file}: {place}{key}{value} {problem}", param=key)

    def _convert(self, key: str, value: Any, kind: Any) -> Any:
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(part for part in typing.get_args(kind) if part is not type(None))
        if typing.get_origin(kind) is Literal:
            return self._choice(key, value, typing.get_args(kind))
        if typing.get_origin(kind) is tuple:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                self.fail(key, 'is no list of texts; write e.g. ["a", "b"]')
            return tuple(value)
        if kind is int and key.endswith("_bytes") and isinstance(value, str):
            return self._size(key, value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if kind is Path and isinstance(value, str) and value:
            return self.path(value)
        # `type() is`: a bool is an int to Python, and no number to a person.
        if type(value) is not kind:
            self.fail(key, f"is no {_NAMES.get(kind, kind)}; give one")
        return value

    def path(self, value: str) -> Path:
        """A path as written: "~" is the user's home, a relative one begins at the file's folder."""
        return (self._file.parent / Path(value).expanduser()).absolute()

    def _choice(self, key: str, value: Any, choices: tuple[Any, ...]) -> Any:
        if value not in choices:
            self.fail(key, f"is not known; choose {', '.join(map(repr, choices))}")
        return value

    def _size(self, key: str, value: str) -> int:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            self.fail(key, 'is no size; write bytes, or e.g. "512MiB", "4GiB"')
        return int(float(match[1]) * _SIZE_UNITS[match[2].lower()])


_NAMES: dict[Any, str] = {
    str: 'text (in quotes, e.g. "x")',
    int: "whole number",
    float: "number",
    bool: "switch (true or false)",
    Path: 'path (in quotes, e.g. "/etc/x")',
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
