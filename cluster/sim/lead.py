"""A fake lead: connects, loads for a random time, serves a `SimEngine`, says what a real lead says at the same moments.

Made by `cluster.sim.agent` for rank 0 of a replica.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cluster.messages import WorkerRef
from cluster.sim.engine import NUM_BLOCKS, REPORT_INTERVAL_S, SimEngine, ready_message
from cluster.sim.link import Connection, SimLink
from sonar.messages import (
    Abort,
    Drain,
    Drained,
    Fault,
    HeadToLead,
    KVEvents,
    LeadHello,
    LeadStats,
    LoadProgress,
    Ping,
    Pong,
    Resume,
    Roll,
    Submit,
    TakeRoll,
    TokenEvent,
    Tokens,
)
from sonar.transport import Codec, PeerId, PeerKind, TransportSettings

PROGRESS_INTERVAL_S = 1.0
STATS_INTERVAL_S = 1.0
_CODEC = Codec(HeadToLead, TransportSettings().max_frame_bytes)


class SimLead:
    """One incarnation's lead.

    Args:
        load_s: from the process's start to ready.
        on_exit: told the exit code when the process ends by itself.
    """

    def __init__(self, link: SimLink, ref: WorkerRef, load_s: float, on_exit: Callable[[int], None]) -> None:
        self.engine = SimEngine()
        self.is_alive = True
        self._link = link
        self._ref = ref
        self._on_exit = on_exit
        self._connection: Connection | None = None
        self._is_ready = self._is_draining = self._is_reporting = False
        self._sequences = [0, 0]
        self._stats_frame = b""
        self._loading = (link.timeline.now_s, load_s)
        self.connect()
        link.timeline.every(PROGRESS_INTERVAL_S, self._progress, PROGRESS_INTERVAL_S)
        link.timeline.after(load_s, self._become_ready)

    def connect(self) -> None:
        """Connects, or again: then everything is said again."""
        peer = PeerId(PeerKind.LEAD, self._ref.replica_id, self._ref.incarnation)
        self._connection = self._link.connect(peer, self._on_frame)
        self._send(LeadHello(incarnation=self._ref.incarnation, replica_id=self._ref.replica_id, pid=1))
        if self._is_ready:
            self._send(ready_message(self._ref.replica_id, self._ref.incarnation))

    def cut(self) -> None:
        """The network is gone."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def end(self) -> None:
        """The process is gone."""
        self.is_alive = False
        self.cut()

    def fault(self) -> None:
        """The engine raises."""
        text = "made up by the simulation"
        self._send(Fault(incarnation=self._ref.incarnation, rank=0, step=1, error=text, traceback=text))
        self._exit(1)

    def _exit(self, code: int) -> None:
        if self.is_alive:
            self._link.timeline.after(0.002, lambda: self._on_exit(code) if self.is_alive else None)

    def _progress(self) -> bool:
        if not self.is_alive or self._is_ready:
            return False
        began_s, load_s = self._loading
        done = int(100 * (self._link.timeline.now_s - began_s) / load_s)
        self._send(LoadProgress(incarnation=self._ref.incarnation, phase="weights", done=done, total=100))
        return True

    def _become_ready(self) -> None:
        if self.is_alive:
            self._is_ready = True
            self._send(ready_message(self._ref.replica_id, self._ref.incarnation))
            self._link.timeline.every(STATS_INTERVAL_S, self._stats, 0.0)

    def _stats(self) -> bool:
        if self.is_alive and self._connection is not None:
            self._connection.send(_CODEC.encode(self._figures()))
        return self.is_alive

    def _figures(self) -> LeadStats:
        engine = self.engine
        return LeadStats(
            incarnation=self._ref.incarnation,
            steps=engine.num_reports,
            num_running=len(engine),
            num_waiting=0,
            blocks_free=NUM_BLOCKS - engine.blocks_cached,
            blocks_cached=engine.blocks_cached,
            blocks_in_use=0,
            blocks_in_transit=0,
            blocks_total=NUM_BLOCKS,
            prompt_tokens=0,
            cached_tokens=0,
            generated_tokens=engine.generated_tokens,
            preemptions=0,
            step_seconds=0.0,
        )

    def _on_frame(self, frame: bytes) -> None:
        message = _CODEC.decode([frame])
        if getattr(message, "incarnation", None) != self._ref.incarnation:
            return
        match message:
            case Submit():
                self.engine.add(message)
                self._wake()
            case Abort(request_id=request_id, finish=finish):
                event = self.engine.abort(request_id, finish)
                self._tell([event] if event else [])
            case Drain():
                self._is_draining = True
                self._wake()
            case Ping(number=number):
                self._send(Pong(incarnation=self._ref.incarnation, number=number))
            case TakeRoll():
                self._tell_roll()
            case Resume():
                pass  # what this lead has told is not kept: its roll is empty, and all begins again
            case _:
                raise AssertionError(message)

    def _tell_roll(self) -> None:
        if self._is_ready:
            incarnation = self._ref.incarnation
            ready = ready_message(self._ref.replica_id, incarnation)
            self._send(Roll(incarnation=incarnation, ready=ready, next_sequence=self._sequences[0]))

    def _wake(self) -> None:
        if not self._is_reporting:
            self._is_reporting = True
            self._link.timeline.every(REPORT_INTERVAL_S, self._report, REPORT_INTERVAL_S)

    def _report(self) -> bool:
        self._is_reporting = self.is_alive and len(self.engine) > 0
        if self._is_reporting:
            self._tell(self.engine.report())
        if self.is_alive and self._is_draining and not self.engine:
            self._send(Drained(incarnation=self._ref.incarnation))
            self._exit(0)
        return self._is_reporting

    def _tell(self, events: list[TokenEvent]) -> None:
        """Numbers are used up also while the network is gone: the head is to see the gap."""
        incarnation = self._ref.incarnation
        if events:
            self._send(Tokens(incarnation=incarnation, sequence=self._count(0), events=events))
        if changes := self.engine.take_kv_events():
            self._send(KVEvents(incarnation=incarnation, sequence=self._count(1), events=changes))

    def _count(self, kind: int) -> int:
        self._sequences[kind] += 1
        return self._sequences[kind] - 1

    def _send(self, message: msgspec.Struct) -> None:
        if self._connection is not None:
            self._connection.send(_CODEC.encode(message))
