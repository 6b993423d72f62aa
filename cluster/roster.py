"""Which hosts have workers, as the store remembers it: whom a later head is to wait for before it starts any.

Advice, not truth: what runs, the hosts say themselves. So it is written now and then, in a thread, and a head that dies
before that costs its successor a start beside a worker that is then ended, never two that serve. Made by
`cluster.control`; the head has it written.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from cluster.store.contract import Store

KEY = "nodes/with-workers"


class Roster:
    """Owner of the list. Reads the store, once, when made.

    Attributes:
        earlier: node ids that an earlier head has left.

    Raises:
        StoreUnavailableError: the store does not answer.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.earlier = _read(store.get(KEY))
        self._saved = self.earlier

    def is_stale(self, nodes: Collection[str]) -> bool:
        """Whether the store says otherwise."""
        return frozenset(nodes) != self._saved

    def save(self, nodes: Collection[str]) -> None:
        """Blocks until it is durable. Raises `StoreUnavailableError`."""
        self._store.put(KEY, msgspec.json.encode(sorted(nodes)))
        self._saved = frozenset(nodes)


def _read(data: bytes | None) -> frozenset[str]:
    try:
        return frozenset(msgspec.json.decode(data or b"[]", type=list[str]))
    except msgspec.MsgspecError:
        return frozenset()  # of a later version, say: then hosts are not waited for
