"""The contract between the head and whatever remembers for it."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """Durable keys and values, small and rarely written. Keys are paths like "incarnation/<replica>"."""

    def put(self, key: str, value: bytes) -> None:
        """Returns once the value would survive a power cut."""
        ...

    def items(self, prefix: str) -> dict[str, bytes]:
        """All pairs whose key begins so."""
        ...

    def close(self) -> None:
        """Further calls are an error."""
        ...
