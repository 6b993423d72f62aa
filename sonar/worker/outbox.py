"""What a lead says to its head: numbered, kept for the next head, and not said at all while there is none.

Knows no engine; the loop hands in what has happened. Called by `sonar.worker.lead_loop`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from sonar.messages import KVEvent, KVEvents, LeadReady, Roll, Submit, TokenEvent, Tokens
from sonar.worker.replay import Replay

# A signal does not end a wait on the link: a lead that waits looks up this often. Four wake-ups a second cost nothing.
MAX_IDLE_S = 0.25


class Link(Protocol):
    """What a lead needs of its connection; `sonar.transport_client.Client` is one."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a head, as far as is known."""
        ...

    def send(self, message: msgspec.Struct) -> bool:
        """False when the queue is full."""
        ...

    def wait_writable(self, timeout_s: float) -> bool:
        """Waits until `send` would take a message, or the link has changed."""
        ...

    def receive(self, timeout_s: float) -> list[Any]:
        """What has come; waits for a first message at most so long."""
        ...

    def take_reconnected(self) -> bool:
        """Whether the connection was made anew."""
        ...


class Outbox:
    """Owner of the numbers and of what can be told again."""

    def __init__(self, link: Link, ready: LeadReady) -> None:
        self._link = link
        self._ready = ready
        self._replay = Replay()
        self._next_tokens = self._next_kv = 0

    def send(self, message: msgspec.Struct) -> None:
        """Sends, waiting while the queue is full: then the head has not read for long, and the engine rests too. Gives
        up when the head is gone: the next one asks."""
        while not self._link.send(message) and self._link.is_connected:
            self._link.wait_writable(MAX_IDLE_S)

    def begin(self, submit: Submit) -> None:
        """A request is taken in: its output is kept."""
        self._replay.begin(submit)

    def tell(self, events: list[TokenEvent], now: float) -> None:
        """What a step did."""
        for event in events:
            self._replay.record(event, now)
        if events and self._link.is_connected:
            self._send_tokens(events)

    def tell_kv(self, changes: list[KVEvent]) -> None:
        """Changes of the prefix cache; numbered also when nobody hears them, so that the gap is seen."""
        if not changes:
            return
        message = KVEvents(incarnation=self._ready.incarnation, sequence=self._next_kv, events=changes)
        self._next_kv += 1
        if self._link.is_connected:
            self.send(message)

    def tell_stats(self, stats: msgspec.Struct, now: float) -> None:
        """The engine's figures; about once a second, so that what ended long ago is forgotten here too."""
        self._replay.expire(now)
        if self._link.is_connected:
            self.send(stats)

    def tell_roll(self) -> None:
        """Answers `TakeRoll`."""
        roll = Roll(
            incarnation=self._ready.incarnation,
            ready=self._ready,
            next_sequence=self._next_tokens,
            requests=self._replay.roll(),
        )
        self.send(roll)

    def resume(self, request_id: str, first: int) -> None:
        """Answers `Resume`."""
        event = self._replay.since(request_id, first)
        if event is not None:
            self._send_tokens([event])

    def _send_tokens(self, events: list[TokenEvent]) -> None:
        message = Tokens(incarnation=self._ready.incarnation, sequence=self._next_tokens, events=events)
        self._next_tokens += 1
        self.send(message)
