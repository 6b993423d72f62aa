"""The number of a head: each one that leads takes the next from the store, and nobody obeys a lower one again.

Called by the head, once it leads.
"""

from __future__ import annotations

from cluster.store.contract import Store

KEY = "head/epoch"


def read_epoch(store: Store) -> int:
    """The number of the latest head; 0 before the first."""
    return int(store.get(KEY) or 0)


def next_epoch(store: Store) -> int:
    """A number above that of every head before. Blocks until it is durable.

    Raises:
        StoreUnavailableError: without the store no number is known to be new.
    """
    while True:
        old = store.get(KEY)
        epoch = int(old or 0) + 1
        if store.compare_and_set(KEY, old, str(epoch).encode()):
            return epoch
