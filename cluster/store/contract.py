"""The contract between the head and whatever remembers for it.

Keys are paths like "incarnation/ceiling", few and rarely written. Every call blocks, at most for the member's deadline,
and may come from any thread: an event loop calls what may be slow in a thread. Members: `cluster.store.registry`.
Election is made of these calls: `cluster.store.election`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sonar.errors import SonarError


class StoreUnavailableError(SonarError):
    """The store did not answer within its deadline. What was asked may have been done or not."""


class Change(NamedTuple):
    """A key has a new value, or none any more."""

    key: str
    value: bytes | None


class News(NamedTuple):
    """What a watch has seen. is_reset: the changes are all pairs there are; forget what is not among them."""

    is_reset: bool
    changes: list[Change]


class Lease(Protocol):
    """A promise to be alive: keys written under it go when it is not refreshed in time, or revoked."""

    @property
    def lease_id(self) -> int:
        """Its number in the store."""
        ...

    def refresh(self) -> bool:
        """The time to live begins anew; False when it is over already, and with it the keys."""
        ...

    def revoke(self) -> None:
        """Its keys go now. A lease that is over is none the worse."""
        ...


class Watch(Protocol):
    """Changes below a prefix, in order, none left out: where some cannot be told, all pairs are told again."""

    def next(self, timeout_s: float) -> News | None:
        """What has changed since the last call; the first one tells all pairs. None when nothing did within the time.

        Raises:
            StoreUnavailableError: the pairs cannot be listed.
        """
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class Store(Protocol):
    """Durable keys and values. Every call may raise `StoreUnavailableError`."""

    def get(self, key: str) -> bytes | None:
        """The present value; None when there is none."""
        ...

    def items(self, prefix: str) -> dict[str, bytes]:
        """All pairs whose key begins so, by key."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Returns once the value would survive a power cut."""
        ...

    def compare_and_set(
        self, key: str, expected: bytes | None, value: bytes | None, lease: Lease | None = None
    ) -> bool:
        """Writes (value None: deletes) if the present value is the expected one (None: there is none).

        Args:
            lease: the pair goes with it.
        Returns:
            Whether the key has that value now by this call.
        """
        ...

    def lease(self, ttl_s: float) -> Lease:
        """A new lease, which lives for that long if it is not refreshed."""
        ...

    def watch(self, prefix: str) -> Watch:
        """Watches all keys that begin so."""
        ...

    def close(self) -> None:
        """Further calls are an error."""
        ...
