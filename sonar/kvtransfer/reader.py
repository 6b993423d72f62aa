"""The side of an exchange that needs blocks: asks, reads as they become ready, and lets the request go on, whatever
happens.

Owner of each transfer from the moment its blocks are set aside. Every wait has a deadline, and every way out but one
ends in `Scheduler.end_fetch`, after which the request computes what did not come. Pure but for the transport's reads.
Called by `sonar.kvtransfer.exchange`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from sonar.kvcache.fetches import BlockFetch
from sonar.kvtransfer.contract import Piece, Reading, ReadState, TransferError, Transport
from sonar.kvtransfer.peer import CacheMemory, Outgoing, PeerKey
from sonar.messages import KVFetchRecord, PairStats
from sonar.peer_messages import AskBlocks, BlocksReady, BlocksRefused, HeldBlocks, KVMemory, ReleaseBlocks
from sonar.request import Request
from sonar.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# The holder speaks at least once a second.
SILENCE_S = 5.0
# How long a whole transfer may take: what a slow holder needs for its own queue, and for each token.
LEAST_S = 20.0
TOKEN_S = 0.05
# How often the head is asked, in effect, whether a peer has ended that a lost read may still copy from.
LOST_LOOK_S = 5.0
# What a read may take beside the transport's own deadline.
READ_LEAST_S = 5.0
READ_FLOOR_BYTES_PER_S = 5e6


@dataclass
class _Read:
    """A read that was posted, and the blocks it fills: (group, indices)."""

    reading: Reading
    filled: list[HeldBlocks]
    size_bytes: int
    began_s: float
    is_early: bool


@dataclass
class _Transfer:
    """A fetch and what has been said of it. request: None once it has no use for it any more."""

    number: int
    peer: PeerKey
    request: Request
    fetch: BlockFetch
    asked_s: float
    news_s: float
    deadline_s: float
    first_s: float = 0.0
    is_all_said: bool = False
    ready: deque[HeldBlocks] = field(default_factory=deque)
    reads: list[_Read] = field(default_factory=list)
    bytes_read: int = 0
    num_cached_there: int = 0
    error: str = ""


class BlockReader:
    """Owner of the transfers to this replica.

    Args:
        wants_checksums: blocks are verified after they were read.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: CacheMemory,
        transport: Transport,
        send: Callable[[Outgoing], None],
        *,
        wants_checksums: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._transport = transport
        self._send = send
        self._wants_checksums = wants_checksums
        self._transfers: dict[int, _Transfer] = {}
        self._next_number = 0
        self._peers: dict[PeerKey, KVMemory] = {}
        self._lost: dict[PeerKey, list[tuple[BlockFetch, _Read]]] = {}
        self._next_look_s = 0.0
        self._stats: dict[str, PairStats] = {}

    # --- what others say ---

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is open."""
        return bool(self._transfers)

    @property
    def is_reading(self) -> bool:
        """Whether a read is under way, or could begin."""
        return any(transfer.reads or transfer.ready for transfer in self._transfers.values())

    def stats(self) -> tuple[PairStats, ...]:
        """Figures of each pair."""
        is_open = [transfer.peer.replica_id for transfer in self._transfers.values()]
        return tuple(
            msgspec.structs.replace(pair, open_fetches=is_open.count(name)) for name, pair in self._stats.items()
        )

    def on_ready(self, peer: PeerKey, message: BlocksReady, now: float) -> None:
        """Blocks can be read."""
        if message.memory is not None and peer not in self._peers:
            try:
                self._transport.connect(peer.text, message.memory.metadata)
                self._peers[peer] = message.memory
            except TransferError as error:
                logger.warning("%s cannot be read: %s", peer.text, error)
        transfer = self._of(peer, message.transfer)
        if transfer is None:
            return
        transfer.news_s = now
        if transfer.fetch.is_over:
            return
        if problem := self._problem(transfer, message):
            self._give_up(transfer, problem, now)
            return
        transfer.first_s = transfer.first_s or now
        transfer.is_all_said = transfer.is_all_said or message.is_last
        transfer.num_cached_there = max(transfer.num_cached_there, message.num_cached_tokens)
        transfer.ready.extend(message.held)

    def on_refused(self, peer: PeerKey, message: BlocksRefused, now: float) -> None:
        """There will be no (more) blocks."""
        transfer = self._of(peer, message.transfer)
        if transfer is not None and not transfer.fetch.is_over:
            self._give_up(transfer, message.reason[:500], now)

    def on_still_held(self, peer: PeerKey, numbers: list[int], now: float) -> None:
        """The holder lives, and what it holds for nobody is released."""
        for number in numbers:
            transfer = self._of(peer, number)
            if transfer is None:
                self._send(Outgoing(peer, ReleaseBlocks(transfer=number)))
            else:
                transfer.news_s = now

    def on_gone(self, peer: PeerKey, has_ended: bool, now: float) -> None:
        """The holder serves no more."""
        for transfer in list(self._transfers.values()):
            if transfer.peer == peer and not transfer.fetch.is_over:
                self._give_up(transfer, f"{peer.replica_id} is gone", now)
        if has_ended:
            for fetch, read in self._lost.pop(peer, []):
                self._settle(fetch, read, is_whole=False)
        if self._peers.pop(peer, None) is not None:
            self._transport.disconnect(peer.text)

    # --- time ---

    def tick(self, now: float) -> None:
        """Asks for what the scheduler has begun, takes in what was read, reads what is ready."""
        for request in self._scheduler.peers.take_begun():
            self._ask(request, now)
        if self._lost and now >= self._next_look_s:
            self._next_look_s = now + LOST_LOOK_S
            for peer in self._lost:
                # Means nothing to it (numbers begin at 1); if it is gone, the head says so, however often it has.
                self._send(Outgoing(peer, ReleaseBlocks(transfer=0)))
        for transfer in list(self._transfers.values()):
            self._take_in(transfer, now)
            if transfer.fetch.is_over:
                self._close_when_quiet(transfer)
                continue
            self._read_ready(transfer, now)
            self._check(transfer, now)

    def _ask(self, request: Request, now: float) -> None:
        fetch, source = request.peers.fetch, request.peers.source
        if fetch is None or source is None:
            return  # aborted before anyone was asked
        peer = PeerKey(source.replica_id, source.incarnation)
        self._next_number += 1
        num_tokens = fetch.end * self._memory.layout.block_size
        deadline_s = now + LEAST_S + TOKEN_S * num_tokens
        transfer = _Transfer(self._next_number, peer, request, fetch, now, now, deadline_s)
        self._transfers[transfer.number] = transfer
        ask = AskBlocks(
            transfer=transfer.number,
            token_ids=request.token_ids[: num_tokens + 1],
            first=fetch.first,
            end=fetch.end,
            layout=self._memory.layout,
            cache_salt=request.peers.cache_salt,
            priority=request.spec.priority,
            only_cached=source.cached_tokens > 0,
            wants_memory=peer not in self._peers,
            wants_checksums=self._wants_checksums,
        )
        self._send(Outgoing(peer, ask))

    def _take_in(self, transfer: _Transfer, now: float) -> None:
        for read in list(transfer.reads):
            state = read.reading.state
            if state is ReadState.UNDER_WAY:
                continue
            transfer.reads.remove(read)
            transfer.news_s = now
            if state is ReadState.LOST:
                self._lost.setdefault(transfer.peer, []).append((transfer.fetch, read))
                self._give_up(transfer, read.reading.error, now)
                continue
            problem = read.reading.error if state is ReadState.FAILED else self._wrong_block(transfer, read)
            is_over = transfer.fetch.is_over
            self._settle(transfer.fetch, read, is_whole=not problem)
            if problem:
                self._give_up(transfer, problem, now)
            elif not is_over:
                transfer.bytes_read += read.size_bytes
                self._count(transfer.peer, read_seconds=now - read.began_s, early_bytes=read.size_bytes * read.is_early)

    def _read_ready(self, transfer: _Transfer, now: float) -> None:
        """Posts one read for all that is ready: the more a read moves, the better."""
        if not transfer.ready or self._scheduler.totals.steps < transfer.fetch.after_step:
            return
        theirs, mine = self._peers[transfer.peer], self._memory
        filled, pieces = list(transfer.ready), []
        transfer.ready.clear()
        for held in filled:
            size = mine.layout.block_bytes[held.group]
            indices = range(held.start, held.start + len(held.block_ids))
            local = self._scheduler.peers.fetches.begin_read(transfer.fetch, held.group, indices)
            remote_base = theirs.addresses[held.group]
            pieces += [
                Piece(mine.address(held.group, to), remote_base + there * size, size)
                for to, there in zip(local, held.block_ids)
                if size  # a pipeline stage may have no layer of the group
            ]
        reading = self._transport.read(transfer.peer.text, pieces)
        size_bytes = sum(piece.size_bytes for piece in pieces)
        transfer.reads.append(_Read(reading, filled, size_bytes, now, is_early=not transfer.is_all_said))

    def _check(self, transfer: _Transfer, now: float) -> None:
        """Whether it is complete, or has taken too long."""
        if transfer.fetch.is_complete and transfer.is_all_said:
            size = self._memory.layout.block_size
            fetched_from = max(transfer.fetch.first * size, transfer.num_cached_there)
            transfer.request.peers.num_fresh = max(0, transfer.fetch.end * size - fetched_from)
            self._finish(transfer, now)
        elif transfer.is_all_said and not transfer.ready and not transfer.reads:
            self._give_up(transfer, "blocks are missing from the last answer", now)
        elif now > transfer.deadline_s:
            self._give_up(transfer, f"not done after {now - transfer.asked_s:.1f} s", now)
        elif now - transfer.news_s > SILENCE_S and not transfer.reads:
            self._give_up(transfer, f"no word from {transfer.peer.replica_id} for {SILENCE_S:.0f} s", now)
        elif any(now - r.began_s > READ_LEAST_S + r.size_bytes / READ_FLOOR_BYTES_PER_S for r in transfer.reads):
            self._give_up(transfer, "a read did not end in time", now)

    # --- ends ---

    def _give_up(self, transfer: _Transfer, error: str, now: float) -> None:
        """The request computes what is missing."""
        if transfer.fetch.is_over:
            return
        transfer.error = error
        logger.warning("%s: blocks from %s: %s", transfer.request.spec.request_id, transfer.peer.text, error)
        recomputed = transfer.fetch.num_missing * self._memory.layout.block_size
        self._count(transfer.peer, failed=1, recomputed_tokens=recomputed)
        self._finish(transfer, now)

    def _finish(self, transfer: _Transfer, now: float) -> None:
        request = transfer.request
        self._count(transfer.peer, fetches=1, bytes_read=transfer.bytes_read)
        if request.first_event is not None:
            request.first_event.kv_fetch = _record(transfer, now, self._memory.layout.block_size)
        transfer.ready.clear()
        self._scheduler.end_fetch(request)
        self._close_when_quiet(transfer)

    def _close_when_quiet(self, transfer: _Transfer) -> None:
        """The holder may have its blocks back once no read of them is under way."""
        if not transfer.reads and transfer.number in self._transfers:
            del self._transfers[transfer.number]
            self._send(Outgoing(transfer.peer, ReleaseBlocks(transfer=transfer.number)))

    def _settle(self, fetch: BlockFetch, read: _Read, *, is_whole: bool) -> None:
        for held in read.filled:
            indices = range(held.start, held.start + len(held.block_ids))
            self._scheduler.peers.fetches.end_read(fetch, held.group, indices, is_whole)
        self._scheduler.wake()

    # --- checks ---

    def _of(self, peer: PeerKey, number: int) -> _Transfer | None:
        transfer = self._transfers.get(number)
        return transfer if transfer is not None and transfer.peer == peer else None

    def _problem(self, transfer: _Transfer, message: BlocksReady) -> str:
        """Why an answer cannot be used; empty when it can."""
        theirs = self._peers.get(transfer.peer)
        if theirs is None:
            return "its memory is not known"
        taken = [(held.group, held.start) for held in transfer.ready]
        for held in message.held:
            if not 0 <= held.group < len(transfer.fetch.missing):
                return f"a block of cache group {held.group}"
            missing = transfer.fetch.missing[held.group]
            indices = range(held.start, held.start + len(held.block_ids))
            if not all(index in missing for index in indices) or (held.group, held.start) in taken:
                return f"blocks {held.start} to {indices.stop - 1} were not asked for"
            if not all(0 <= block < theirs.num_blocks[held.group] for block in held.block_ids):
                return f"block ids {held.block_ids} do not exist there"
            if self._wants_checksums and len(held.checksums) != len(held.block_ids):
                return "checksums are missing"
        return ""

    def _wrong_block(self, transfer: _Transfer, read: _Read) -> str:
        """Which block is not what the holder has; empty when all are, or nobody asked."""
        if not self._wants_checksums or transfer.fetch.is_over:
            return ""
        for held in read.filled:
            for offset, checksum in enumerate(held.checksums):
                block = transfer.fetch.reading[held.group][held.start + offset]
                if self._memory.checksum(held.group, block) != checksum:
                    return f"block {held.start + offset} arrived with other bytes than it has there"
        return ""

    def _count(
        self,
        peer: PeerKey,
        *,
        fetches: int = 0,
        failed: int = 0,
        bytes_read: int = 0,
        early_bytes: int = 0,
        recomputed_tokens: int = 0,
        read_seconds: float = 0.0,
    ) -> None:
        pair = self._stats.get(peer.replica_id) or PairStats(replica_id=peer.replica_id)
        self._stats[peer.replica_id] = msgspec.structs.replace(
            pair,
            fetches=pair.fetches + fetches,
            failed=pair.failed + failed,
            bytes_read=pair.bytes_read + bytes_read,
            early_bytes=pair.early_bytes + early_bytes,
            recomputed_tokens=pair.recomputed_tokens + recomputed_tokens,
            read_seconds=pair.read_seconds + read_seconds,
        )


def _record(transfer: _Transfer, now: float, block_size: int) -> KVFetchRecord:
    arrived_s = transfer.request.spec.arrival_s
    fetch = transfer.fetch
    return KVFetchRecord(
        replica_id=transfer.peer.replica_id,
        incarnation=transfer.peer.incarnation,
        tokens=(fetch.num_wanted - fetch.num_missing) * block_size,
        bytes_read=transfer.bytes_read,
        asked_s=transfer.asked_s - arrived_s,
        first_s=(transfer.first_s or now) - arrived_s,
        done_s=now - arrived_s,
        error=transfer.error,
    )
