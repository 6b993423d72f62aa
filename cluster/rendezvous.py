"""Where the ranks of an incarnation find each other: a small key-value store for each, as torch.distributed wants one.

Pure: requests in, replies out, with `now` handed in; a read whose keys are not there waits until they come or its time
is up. What a replica stored is forgotten when another of its incarnations begins or it ends. Bounded: a cluster's
members trust each other, yet one with a fault shall not fill the head. Called by `cluster.control`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from sonar.messages import StoreAdd, StoreDelete, StoreRead, StoreReply, StoreRequest, StoreSize, StoreWrite

MAX_KEYS = 200_000
MAX_VALUE_BYTES = 1 << 20
MAX_WAIT_S = 60.0


class RankReply(NamedTuple):
    """What a rank of the replica is to be sent."""

    rank: int
    message: StoreReply


@dataclass
class _Waiting:
    """A read whose keys are not all there."""

    rank: int
    request: StoreRead
    due_s: float


@dataclass
class _Space:
    """One incarnation's keys."""

    incarnation: int
    values: dict[str, bytes] = field(default_factory=dict)
    waiting: list[_Waiting] = field(default_factory=list)


class Rendezvous:
    """Owns the stores of all replicas."""

    def __init__(self) -> None:
        self._spaces: dict[str, _Space] = {}

    @property
    def num_replicas(self) -> int:
        """Replicas with a store."""
        return len(self._spaces)

    def handle(
        self, replica_id: str, incarnation: int, rank: int, request: StoreRequest, now: float
    ) -> list[RankReply]:
        """Carries a request out; the replies that are due now, to this rank and to those whose wait it ends.

        Args:
            incarnation: the present one (the caller has dropped stale ones).
        """
        space = self._spaces.get(replica_id)
        if space is None or space.incarnation != incarnation:
            space = self._spaces[replica_id] = _Space(incarnation)
        match request:
            case StoreWrite(number=number, key=key, value=value, expected=expected):
                old = space.values.get(key)
                if expected is None or old == expected or (old is None and not expected):
                    self._set(space, key, value)
                reply = StoreReply(number=number, values=[space.values.get(key, expected or b"")])
                return [RankReply(rank, reply), *_wake(space)]
            case StoreAdd(number=number, key=key, amount=amount):
                count = _as_number(space.values.get(key, b"0")) + amount
                self._set(space, key, str(count).encode())
                return [RankReply(rank, StoreReply(number=number, count=count)), *_wake(space)]
            case StoreRead():
                waiting = _Waiting(rank, request, now + min(request.timeout_s, MAX_WAIT_S))
                reply = _answer(space, request)
                if not reply.missing or request.timeout_s <= 0:
                    return [RankReply(rank, reply)]
                space.waiting.append(waiting)
                return []
            case StoreDelete(number=number, key=key):
                count = int(space.values.pop(key, None) is not None)
                return [RankReply(rank, StoreReply(number=number, count=count))]
            case StoreSize(number=number):
                return [RankReply(rank, StoreReply(number=number, count=len(space.values)))]
            case _:
                assert_never(request)

    def tick(self, now: float) -> list[tuple[str, int, RankReply]]:
        """Answers reads whose time is up: (replica id, incarnation, reply)."""
        due = []
        for replica_id, space in self._spaces.items():
            late = [waiting for waiting in space.waiting if now >= waiting.due_s]
            for waiting in late:
                space.waiting.remove(waiting)
                reply = RankReply(waiting.rank, _answer(space, waiting.request))
                due.append((replica_id, space.incarnation, reply))
        return due

    def forget(self, replica_id: str) -> None:
        """Drops what a replica stored."""
        self._spaces.pop(replica_id, None)

    @staticmethod
    def _set(space: _Space, key: str, value: bytes) -> None:
        """Over the limits nothing is kept: the rank that waits for it says what it waited for."""
        if len(value) <= MAX_VALUE_BYTES and (key in space.values or len(space.values) < MAX_KEYS):
            space.values[key] = value


def _answer(space: _Space, request: StoreRead) -> StoreReply:
    missing = [key for key in request.keys if key not in space.values]
    values = [] if missing else [space.values[key] for key in request.keys]
    return StoreReply(number=request.number, values=values, missing=missing)


def _wake(space: _Space) -> list[RankReply]:
    """Replies to reads that have all they waited for."""
    replies, waiting = [], []
    for one in space.waiting:
        reply = _answer(space, one.request)
        if reply.missing:
            waiting.append(one)
        else:
            replies.append(RankReply(one.rank, reply))
    space.waiting = waiting
    return replies


def _as_number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        return 0
