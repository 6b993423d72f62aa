"""The side of an exchange that has blocks or computes them: says which can be read, keeps them until released.

Computing is an export of the scheduler: a request of which no token is drawn. Full groups are told block by block as
chunks are done, so that the reader reads while the rest is computed; a sliding group's window is told at the end. Pure.
Called by `sonar.kvtransfer.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sonar.config import LayerKind
from sonar.errors import ProtocolError, UserError
from sonar.kvcache.groups import CacheGroup
from sonar.kvtransfer.peer import CacheMemory, Outgoing, PeerKey
from sonar.messages import Submit
from sonar.peer_messages import AskBlocks, BlocksReady, BlocksRefused, HeldBlocks, KVMemory, StillHeld
from sonar.request import Request, RequestStatus
from sonar.sampling_params import SamplingParams
from sonar.scheduler.scheduler import Scheduler

STILL_HELD_S = 1.0
# Exports that one replica may have open; more are refused, and computed where they are wanted.
MAX_EXPORTS = 1024


@dataclass
class _Export:
    """What a peer has asked for. next_index: of the first block of full groups that was not told yet."""

    peer: PeerKey
    ask: AskBlocks
    request: Request
    next_index: int
    has_told_memory: bool = False


class BlockHolder:
    """Owner of what peers have asked of this replica.

    Args:
        metadata: of the transport, for peers that do not know where blocks lie.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        groups: tuple[CacheGroup, ...],
        memory: CacheMemory,
        metadata: bytes,
        send: Callable[[Outgoing], None],
    ) -> None:
        self._scheduler = scheduler
        self._groups = groups
        self._memory = memory
        self._place = KVMemory(memory.addresses, memory.num_blocks, metadata)
        self._send = send
        self._exports: dict[tuple[PeerKey, int], _Export] = {}
        self._told_s: dict[PeerKey, float] = {}

    @property
    def is_busy(self) -> bool:
        """Whether something is kept for a peer."""
        return bool(self._exports)

    def on_ask(self, peer: PeerKey, ask: AskBlocks, now: float) -> None:
        """A peer wants blocks."""
        if (peer, ask.transfer) in self._exports:
            return
        if problem := self._problem(ask):
            self._send(Outgoing(peer, BlocksRefused(transfer=ask.transfer, reason=problem)))
            return
        submit = Submit(
            incarnation=0,
            request_id=f"{peer.text}/{ask.transfer}~kv",
            prompt_token_ids=ask.token_ids,
            sampling=SamplingParams(seed=0, max_tokens=1),
            priority=ask.priority,
            cache_salt=ask.cache_salt,
        )
        try:
            request = self._scheduler.add_export(submit, now)
        except (UserError, ProtocolError) as error:
            self._send(Outgoing(peer, BlocksRefused(transfer=ask.transfer, reason=str(error))))
            return
        self._exports[peer, ask.transfer] = _Export(peer, ask, request, ask.first, not ask.wants_memory)
        self._told_s.setdefault(peer, now)

    def on_release(self, peer: PeerKey, transfer: int) -> None:
        """A peer has read what it wanted, or does not want it any more."""
        export = self._exports.pop((peer, transfer), None)
        if export is not None:
            self._scheduler.abort(export.request.spec.request_id)

    def on_gone(self, peer: PeerKey) -> None:
        """A peer serves no more: whatever it still reads is of no use to anyone."""
        for key in [key for key in self._exports if key[0] == peer]:
            self.on_release(*key)
        self._told_s.pop(peer, None)

    def tick(self, now: float) -> None:
        """Tells what has become ready, and that the rest is not forgotten."""
        for export in self._exports.values():
            self._tell(export)
        for peer, told_s in list(self._told_s.items()):
            numbers = [transfer for of, transfer in self._exports if of == peer]
            if not numbers:
                del self._told_s[peer]
            elif now - told_s >= STILL_HELD_S:
                self._told_s[peer] = now
                self._send(Outgoing(peer, StillHeld(transfers=numbers)))

    def _problem(self, ask: AskBlocks) -> str:
        """Why an ask is refused; empty when it is not."""
        if difference := self._memory.layout.difference(ask.layout):
            return f"the caches do not match: {difference}"
        if len(self._exports) >= MAX_EXPORTS:
            return f"{MAX_EXPORTS} transfers are open"
        size = self._memory.layout.block_size
        if not 0 <= ask.first < ask.end or len(ask.token_ids) != ask.end * size + 1:
            return f"blocks {ask.first} to {ask.end} of {len(ask.token_ids)} tokens"
        if ask.only_cached and not self._scheduler.peers.is_cached(ask.token_ids, ask.cache_salt):
            return "they are not cached any more"
        return ""

    def _tell(self, export: _Export) -> None:
        """Blocks that are ready and were not told. Nothing follows the last ones."""
        ask, request = export.ask, export.request
        if export.next_index > ask.end:
            return
        size = self._memory.layout.block_size
        ready = min(request.peers.num_ready // size, ask.end)
        is_last = ready == ask.end and request.status is RequestStatus.HOLDING
        if ready <= export.next_index and not is_last:
            return
        held = []
        for index, (group, table) in enumerate(zip(self._groups, request.blocks.tables)):
            if group.kind is LayerKind.FULL:
                start, end = export.next_index, ready
            elif is_last:
                start, end = group.first_block(ask.end * size, size), ask.end
            else:
                continue
            if end > start:
                ids = table.ids[start - table.first : end - table.first]
                held.append(HeldBlocks(index, start, ids, self._checksums(ask, index, ids)))
        export.next_index = ask.end + 1 if is_last else ready
        message = BlocksReady(
            transfer=ask.transfer,
            held=held,
            is_last=is_last,
            memory=None if export.has_told_memory else self._place,
            num_cached_tokens=request.peers.num_cached,
        )
        export.has_told_memory = True
        self._send(Outgoing(export.peer, message))

    def _checksums(self, ask: AskBlocks, group: int, ids: list[int]) -> list[int]:
        return [self._memory.checksum(group, block) for block in ids] if ask.wants_checksums else []
