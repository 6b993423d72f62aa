"""A replica's exchange of KV blocks with other replicas: messages in and out, both sides of it, and the transport.

Runs in the engine loop, between steps; never waits. Knows no sockets: the loop carries the messages. Called by
`sonar.worker.lead_loop`; made by `sonar.engine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from sonar.kvcache.groups import CacheGroup
from sonar.kvtransfer.contract import Transport
from sonar.kvtransfer.holder import BlockHolder
from sonar.kvtransfer.peer import CacheMemory, Outgoing, PeerKey
from sonar.kvtransfer.reader import BlockReader
from sonar.messages import PairStats
from sonar.peer_messages import (
    AskBlocks,
    BlocksReady,
    BlocksRefused,
    PeerMessage,
    ReleaseBlocks,
    StillHeld,
)
from sonar.scheduler.scheduler import Scheduler

# A read of a block takes less than a millisecond on one host, and an idle loop has nothing else to do.
_READING_S = 0.001
_WAITING_S = 0.1


class KVExchange:
    """Owns the reader, the holder, and the messages that wait to be sent.

    Args:
        transport: with its memory registered.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        groups: tuple[CacheGroup, ...],
        memory: CacheMemory,
        transport: Transport,
        *,
        wants_checksums: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._transport = transport
        self._clock = clock
        self._outbox: list[Outgoing] = []
        send = self._outbox.append
        self._reader = BlockReader(scheduler, memory, transport, send, wants_checksums=wants_checksums)
        self._holder = BlockHolder(scheduler, groups, memory, transport.metadata(), send)

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is open on either side, or a request, which may wait for blocks of one that is over."""
        return self._reader.is_busy or self._holder.is_busy or self._scheduler.num_open > 0

    @property
    def wait_s(self) -> float:
        """How long an idle loop may sleep before it calls `tick`."""
        return _READING_S if self._reader.is_reading else _WAITING_S

    def receive(self, replica_id: str, incarnation: int, message: PeerMessage) -> None:
        """A peer says something."""
        peer, now = PeerKey(replica_id, incarnation), self._clock()
        match message:
            case AskBlocks():
                self._holder.on_ask(peer, message, now)
            case ReleaseBlocks(transfer=transfer):
                self._holder.on_release(peer, transfer)
            case BlocksReady():
                self._reader.on_ready(peer, message, now)
            case BlocksRefused():
                self._reader.on_refused(peer, message, now)
            case StillHeld(transfers=transfers):
                self._reader.on_still_held(peer, transfers, now)
            case _:
                assert_never(message)

    def peer_gone(self, replica_id: str, incarnation: int, has_ended: bool) -> None:
        """A peer's incarnation serves no more."""
        peer = PeerKey(replica_id, incarnation)
        self._reader.on_gone(peer, has_ended, self._clock())
        self._holder.on_gone(peer)

    def tick(self) -> list[Outgoing]:
        """After each step, and while the loop is idle: what is to be sent to peers."""
        now = self._clock()
        self._holder.tick(now)
        self._reader.tick(now)
        messages = self._outbox[:]
        self._outbox.clear()
        return messages

    def stats(self) -> tuple[PairStats, ...]:
        """Figures of each pair."""
        return self._reader.stats()

    def close(self) -> None:
        """Ends the transport."""
        self._transport.close()
