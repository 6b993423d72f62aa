"""Which incarnation numbers no earlier head has given: one durable number for all replicas, raised in steps.

A write a start would hold up a large cluster's start (5 ms each on a virtual disk), and a store that is away would hold
up every restart. So a ceiling is written ahead: numbers up to it may be given without another write. Made by
`cluster.control`; the head raises the ceiling in time, in a thread.
"""

from __future__ import annotations

from cluster.store.contract import Store

KEY = "incarnation/ceiling"
STEP = 64


class IncarnationCeiling:
    """Owner of the number. Reads and writes the store, once each, when made.

    Attributes:
        floor: an earlier head may have given any number up to it, to any replica.
        ceiling: numbers above floor up to it are this head's to give.

    Raises:
        StoreUnavailableError: the store does not answer; without it no number is known to be new.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.floor = self._highest = int(store.get(KEY) or 0)
        self.ceiling = 0
        self.raise_ceiling()

    @property
    def is_near(self) -> bool:
        """Whether the ceiling should be raised soon."""
        return self._highest > self.ceiling - STEP // 2

    def saw(self, incarnation: int) -> None:
        """A replica got that number."""
        assert incarnation <= self.ceiling, (incarnation, self.ceiling)
        self._highest = max(self._highest, incarnation)

    def raise_ceiling(self) -> None:
        """Blocks until it is durable. Raises `StoreUnavailableError`; nothing has changed then."""
        ceiling = self._highest + STEP
        self._store.put(KEY, str(ceiling).encode())
        self.ceiling = ceiling
