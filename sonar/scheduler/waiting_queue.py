"""Requests that wait for a slot and blocks, in the order in which they are to be tried.

Order and bound of the queue are decided here and nowhere else, so that another order (fair shares over API keys) is a
change of this file. Knows nothing of blocks or steps. Called by the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from sonar.errors import CapacityError
from sonar.request import Request


class WaitingQueue:
    """Owner of the waiting requests: by priority, preempted before new ones, then by arrival.

    A sorted list rather than a heap: requests are passed over, not only taken from the front, and aborted anywhere; for
    the few thousand there may be, moving the pointers behind one costs about a microsecond.

    Args:
        max_waiting: new requests that may wait at a time; preempted ones always find room.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._items: list[Request] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        """In the order to be tried; the queue is not to be changed meanwhile."""
        return iter(self._items)

    def push(self, request: Request) -> None:
        """Adds a new request.

        Raises:
            CapacityError: the queue is full.
        """
        if len(self._items) >= self._max_waiting:
            raise CapacityError(
                f"{len(self._items)} requests are waiting and the queue holds max_waiting={self._max_waiting}; "
                "try again later",
                code="queue_full",
            )
        insort(self._items, request, key=_rank)

    def push_back(self, request: Request) -> None:
        """Returns a preempted request, in front of the new ones of its priority."""
        assert request.is_preempted, f"{request.spec.request_id} was not preempted"
        insort(self._items, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Takes out a request that is in the queue."""
        at = bisect_left(self._items, request.queue_rank, key=_rank)
        assert at < len(self._items) and self._items[at] is request, f"{request.spec.request_id} is not waiting"
        del self._items[at]


def _rank(request: Request) -> tuple[int, bool, int]:
    return request.queue_rank
