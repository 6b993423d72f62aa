"""Copies of the journal of answers at the heads that stand by: an update is sent to its client once they have it too.

So a standby that takes over knows all that any client has seen, at the price of one round trip an update, for answers
that are resumable alone. A standby that is too slow is left behind until it asks again: clients do not wait for it, and
meanwhile a takeover by it would lose what it has not got. Knows no sockets. Made by the head that leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from cluster.standby_messages import Acked, Follow, JournalRow, Rows, StandbyToHead
from sonar.transport import PeerId

logger = logging.getLogger(__name__)

# How long an update waits for a standby's word.
ACK_TIMEOUT_S = 1.0
# A frame of a whole journal's copy; far below what a link takes.
CHUNK_BYTES = 2 << 20

Send = Callable[[PeerId, msgspec.Struct], bool]


@dataclass
class _Follower:
    """A standby. acked: the number up to which it has written. is_live: it has been sent all there was."""

    acked: int = 0
    is_live: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)


class JournalMirror:
    """Owner of the numbers and of the list of followers. Everything happens in the head's loop.

    Args:
        read_all: the journal's whole content, as of a moment; what is written later comes by `copy`.
    """

    def __init__(self, send: Send, read_all: Callable[[], Coroutine[None, None, list[JournalRow]]]) -> None:
        self._send = send
        self._read_all = read_all
        self._followers: dict[PeerId, _Follower] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    @property
    def num_followers(self) -> int:
        """Standbys that have all there is."""
        return sum(follower.is_live for follower in self._followers.values())

    def on_message(self, peer: PeerId, message: StandbyToHead) -> None:
        """From a standby."""
        match message:
            case Follow():
                self._followers[peer] = _Follower()
                task = asyncio.get_running_loop().create_task(self._catch_up(peer, self._followers[peer]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Acked(number=number) if peer in self._followers:
                follower = self._followers[peer]
                follower.acked = max(follower.acked, number)
                follower.news.set()

    async def copy(self, row: JournalRow) -> None:
        """Returns once every live standby has written it, or was left behind."""
        live = self.tell(row)
        number = self._number
        try:
            async with asyncio.timeout(ACK_TIMEOUT_S):
                for peer, follower in live:
                    while follower.acked < number and self._followers.get(peer) is follower:
                        follower.news.clear()
                        await follower.news.wait()
        except TimeoutError:
            for peer, follower in live:
                if follower.acked < number:
                    self._leave(peer, follower, f"did not answer within {ACK_TIMEOUT_S:g} s")

    def tell(self, row: JournalRow) -> list[tuple[PeerId, _Follower]]:
        """The same without waiting; the live standbys."""
        live = [(peer, follower) for peer, follower in self._followers.items() if follower.is_live]
        self._number += bool(live)
        for peer, follower in live:
            if not self._send(peer, Rows(number=self._number, rows=[row])):
                self._leave(peer, follower, "cannot be reached")
        return live

    def close(self) -> None:
        """Nobody is copied to any more."""
        for task in self._tasks:
            task.cancel()
        self._followers.clear()

    async def _catch_up(self, peer: PeerId, follower: _Follower) -> None:
        rows = await self._read_all()
        # From here to the end without a pause, so that no row falls between the copy and what follows it.
        for index, chunk in enumerate(_chunks(rows)):
            self._number += 1
            if not self._send(peer, Rows(number=self._number, rows=chunk, is_first=index == 0)):
                self._leave(peer, follower, "cannot be reached")
                return
        follower.is_live = self._followers.get(peer) is follower
        logger.info("standby %s follows, from %d rows on", peer.name, len(rows))

    def _leave(self, peer: PeerId, follower: _Follower, why: str) -> None:
        if self._followers.get(peer) is follower:
            logger.warning("standby %s %s: it is left behind until it asks again", peer.name, why)
            del self._followers[peer]
            follower.news.set()


def _chunks(rows: Iterable[JournalRow]) -> Iterator[list[JournalRow]]:
    """At least one chunk, maybe an empty one."""
    chunk: list[JournalRow] = []
    size_bytes = 0
    for row in rows:
        chunk.append(row)
        size_bytes += len(row.record) + len(row.events) + len(row.output) + 100
        if size_bytes > CHUNK_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
    yield chunk
