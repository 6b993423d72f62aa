"""torch.distributed's store over a rank's authenticated link to the head: rendezvous keys of one incarnation.

A plain TCPStore would listen to anyone who reaches its port. The keys live in the head (`cluster.rendezvous`), under
the replica's incarnation. Called by torch, from any of its threads.
"""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed import DistStoreError

from sonar.distributed.rank_link import RankLink
from sonar.messages import StoreAdd, StoreDelete, StoreRead, StoreSize, StoreWrite

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store

DEFAULT_TIMEOUT_S = 120.0
# A wait is asked for in pieces, so that other threads of this process get their turn.
_PIECE_S = 0.5


class HeadStore(Store):
    """Implements `torch.distributed.Store`."""

    def __init__(self, link: RankLink, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__()
        self._link = link
        self._incarnation = link.spec.incarnation
        self._timeout = timedelta(seconds=timeout_s)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._link.ask(lambda number: StoreWrite(incarnation=self._incarnation, number=number, key=key, value=data))

    def get(self, key: str) -> bytes:
        return self._read([key], self._timeout.total_seconds())[0]

    def add(self, key: str, amount: int) -> int:
        make = partial(StoreAdd, incarnation=self._incarnation, key=key, amount=amount)
        return self._link.ask(lambda number: make(number=number)).count

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        old = expected.encode() if isinstance(expected, str) else bytes(expected)
        new = value.encode() if isinstance(value, str) else bytes(value)
        make = partial(StoreWrite, incarnation=self._incarnation, key=key, value=new, expected=old)
        return self._link.ask(lambda number: make(number=number)).values[0]

    def delete_key(self, key: str) -> bool:
        make = partial(StoreDelete, incarnation=self._incarnation, key=key)
        return bool(self._link.ask(lambda number: make(number=number)).count)

    def num_keys(self) -> int:
        return self._link.ask(lambda number: StoreSize(incarnation=self._incarnation, number=number)).count

    def check(self, keys: list[str]) -> bool:
        make = partial(StoreRead, incarnation=self._incarnation, keys=list(keys))
        return not self._link.ask(lambda number: make(number=number)).missing

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._read(list(keys), (timeout or self._timeout).total_seconds())

    def _read(self, keys: list[str], timeout_s: float) -> list[bytes]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, min(_PIECE_S, deadline_s - time.monotonic()))
            make = partial(StoreRead, incarnation=self._incarnation, keys=keys, timeout_s=left_s)
            reply = self._link.ask(lambda number, make=make: make(number=number), left_s)  # type: ignore[misc]
            if not reply.missing:
                return reply.values
            if time.monotonic() >= deadline_s:
                raise DistStoreError(f"keys {reply.missing} did not come within {timeout_s:g} s: see other ranks")
