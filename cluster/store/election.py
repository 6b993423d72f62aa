"""One leader among candidates, by a lease in the store: whoever wrote the key first leads until its lease ends.

Pure but for the store's calls: `tick` is to be called several times a lease. A leader that cannot refresh in time has
to take itself for deposed before the store does: `is_leader` counts from the moment before the refresh was asked for.
Knows nothing of heads.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.store.contract import Lease, Store, StoreUnavailableError

# A candidate that hangs between the store's answer and its own next look at the clock must not overstay.
SAFE_SHARE = 0.9
TICKS_PER_LEASE = 4


class Election:
    """Owner of one candidate's lease.

    Args:
        key: what is led. name: of this candidate, unlike every other's and every earlier start's; the key's value.
        ttl_s: whole seconds; how long a leader that is gone is waited for.
        clock: monotonic seconds.
    """

    def __init__(self, store: Store, key: str, name: bytes, ttl_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._key = key
        self._name = name
        self._ttl_s = ttl_s
        self._clock = clock
        self._lease: Lease | None = None
        self._safe_until_s = 0.0

    @property
    def interval_s(self) -> float:
        """Between two ticks."""
        return self._ttl_s / TICKS_PER_LEASE

    @property
    def is_leader(self) -> bool:
        """Whether nobody else can lead at this moment."""
        return self._lease is not None and self._clock() < self._safe_until_s

    def tick(self) -> bool:
        """Refreshes the lead, or tries to get it; blocks for the store's deadline at most. Returns `is_leader`."""
        asked_s = self._clock()
        try:
            if self._lease is not None and not self._lease.refresh():
                self._lease = None
            if self._lease is None:
                self._lease = self._campaign()
            if self._lease is not None:
                self._safe_until_s = asked_s + SAFE_SHARE * self._ttl_s
        except StoreUnavailableError:
            pass  # the lead lasts as long as it was promised
        return self.is_leader

    def leader(self) -> bytes | None:
        """Name of whoever leads; None while nobody does."""
        return self._store.get(self._key)

    def resign(self) -> None:
        """Lets another lead at once."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.revoke()

    def _campaign(self) -> Lease | None:
        if self._store.get(self._key) not in (None, self._name):
            return None
        lease = self._store.lease(self._ttl_s)
        if self._store.compare_and_set(self._key, None, self._name, lease):
            return lease
        lease.revoke()
        return None
