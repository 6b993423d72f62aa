"""Replicas with room, least loaded first, kept sorted while loads change. Knows nothing of requests or prompts.

A sorted list: with some thousand replicas a change moves a few kilobytes, which takes about a microsecond, and the
least loaded ones can be read off. Called by `cluster.routing.routes`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Set
from itertools import islice

# With more than this part of all replicas among those asked for, they are met soon on the way from the least loaded.
WALK_SHARE = 8


class LoadOrder:
    """Owner of the order of one deployment's replicas. Equal loads are ordered by name, so that choices repeat."""

    def __init__(self) -> None:
        self._sorted: list[tuple[int, str]] = []
        self._loads: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._loads

    def __iter__(self) -> Iterator[str]:
        """Least loaded first; not to be changed meanwhile."""
        return (replica_id for _, replica_id in self._sorted)

    def put(self, replica_id: str, load: int) -> None:
        """A replica has room, and that load."""
        old = self._loads.get(replica_id)
        if old != load:
            self.remove(replica_id)
            self._loads[replica_id] = load
            insort(self._sorted, (load, replica_id))

    def remove(self, replica_id: str) -> None:
        """A replica has no room, or is gone."""
        load = self._loads.pop(replica_id, None)
        if load is not None:
            del self._sorted[bisect_left(self._sorted, (load, replica_id))]

    def least(self, count: int) -> list[str]:
        """The least loaded ones."""
        return [replica_id for _, replica_id in self._sorted[:count]]

    def least_of(self, replica_ids: Set[str], count: int, but_not: Container[str] = ()) -> list[str]:
        """The least loaded ones among these, as far as they have room."""
        if WALK_SHARE * len(replica_ids) < len(self._sorted):
            few = sorted((self._loads[name], name) for name in replica_ids if name in self._loads)
            names: Iterator[str] = (name for _, name in few)
        else:
            names = (name for _, name in self._sorted if name in replica_ids)
        return list(islice((name for name in names if name not in but_not), count))
