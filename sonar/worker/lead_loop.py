"""The engine loop of a lead: inbox, step, outbox, over and over, in one thread.

Synchronous: between two steps it takes what the head has sent, and after each it sends what came out. Idle, it waits on
the inbox. Without a head it computes on what it has: what came out is kept (`sonar.worker.outbox`) and told to the next
head that asks. How long it may, its agent decides. Knows no models and no signals; the engine and the link are handed
in. Called by `sonar.worker.lead`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

import msgspec

from sonar.errors import ProtocolError, UserError
from sonar.messages import (
    Abort,
    Drain,
    Drained,
    Draining,
    FinishReason,
    FromPeer,
    HeadToLead,
    KVEvent,
    LeadHello,
    LeadReady,
    LeadStats,
    PeerGone,
    Ping,
    Pong,
    Resume,
    StepAhead,
    Submit,
    TakeRoll,
    TokenEvent,
    ToPeer,
)
from sonar.peer_messages import AskBlocks, BlocksRefused, PeerMessage
from sonar.worker.outbox import MAX_IDLE_S, Link, Outbox
from sonar.worker.step_forecast import StepForecast

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 1.0


# A shorter step is not announced: its head waits longer than this for news in any case (`Timeouts.hang_s`).
ANNOUNCED_S = 1.0


class StepObserver(Protocol):
    """Who is told when an engine waits for a step; it tells of every step, in pairs."""

    def step_began(self, num_tokens: int) -> None:
        """The result of a step of so many tokens is waited for."""
        ...

    def step_ended(self, num_tokens: int) -> None:
        """It is there."""
        ...


class ServingEngine(Protocol):
    """What the loop needs of an engine; `sonar.engine.Engine` is one."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def add(self, submit: Submit) -> TokenEvent | None:
        """Takes a request in; its terminal event if it has ended already. Raises `UserError` for that request alone."""
        ...

    def abort(self, request_id: str, finish: FinishReason) -> TokenEvent | None:
        """Ends a request; its terminal event, None for an unknown id."""
        ...

    def watch(self, observer: StepObserver) -> None:
        """Tells the observer of steps from now on."""
        ...

    def step(self) -> list[TokenEvent]:
        """Computes a step. What it raises ends the replica."""
        ...

    def stats(self) -> LeadStats:
        """Figures of now."""
        ...

    def take_kv_events(self) -> list[KVEvent]:
        """Changes of the prefix cache since the last call."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


class PeerPort(Protocol):
    """The replica's exchange with others, as the loop drives it; `sonar.kvtransfer.exchange.KVExchange` is one."""

    @property
    def is_busy(self) -> bool:
        """Whether something is open with another replica."""
        ...

    @property
    def wait_s(self) -> float:
        """How long the loop may sleep while it is."""
        ...

    def receive(self, replica_id: str, incarnation: int, message: PeerMessage) -> None:
        """Another replica says something."""
        ...

    def peer_gone(self, replica_id: str, incarnation: int, has_ended: bool) -> None:
        """It serves no more."""
        ...

    def tick(self) -> Sequence[tuple[tuple[str, int], PeerMessage]]:
        """What is to be said: (replica id, incarnation), message."""
        ...


class _StatsTimer:
    """When the next `LeadStats` is due: once a second, and when the engine begins or ends its work."""

    def __init__(self, now: float) -> None:
        self.next_s = now
        self._was_busy = False

    def take(self, now: float, is_busy: bool) -> bool:
        """Whether it is now."""
        if now < self.next_s and is_busy == self._was_busy:
            return False
        self._was_busy = is_busy
        self.next_s = now + STATS_INTERVAL_S
        return True


class LeadLoop:
    """Runs an engine for a head.

    Args:
        hello, ready: said (again) when the connection was made anew.
        should_drain: asked between steps; true once the process was told to end.
        clock: monotonic seconds.
        peers: the exchange of KV blocks with other replicas; None when there is none.

    Attributes:
        num_steps: that ended well. num_stale: messages of another incarnation, dropped.
    """

    def __init__(
        self,
        engine: ServingEngine,
        link: Link,
        hello: LeadHello,
        ready: LeadReady,
        should_drain: Callable[[], bool],
        clock: Callable[[], float],
        peers: PeerPort | None = None,
    ) -> None:
        self.num_steps = 0
        self.num_stale = 0
        self._engine = engine
        self._link = link
        self._greeting = (hello, ready)
        self._should_drain = should_drain
        self._clock = clock
        self._outbox = Outbox(link, ready)
        self._is_draining = False
        self._stats_timer = _StatsTimer(clock())
        self._peers = peers
        self._forecast = StepForecast()
        engine.watch(self)

    @property
    def _incarnation(self) -> int:
        return self._greeting[0].incarnation

    def step_began(self, num_tokens: int) -> None:
        """See `StepObserver`: says so when a long step lies ahead."""
        expected_s = self._forecast.expected_s(num_tokens)
        if expected_s > ANNOUNCED_S:
            self._outbox.send(
                StepAhead(
                    incarnation=self._incarnation, step=self.num_steps, num_tokens=num_tokens, expected_s=expected_s
                )
            )
            self._stats_timer.next_s = self._clock()  # which ends the head's patience once the step has ended
        self._forecast.began(self._clock())

    def step_ended(self, num_tokens: int) -> None:
        """See `StepObserver`."""
        self._forecast.ended(num_tokens, self._clock())

    def run(self) -> None:
        """Serves until drained. Raises what a step raises; the engine is then of no more use."""
        while True:
            if self._should_drain() and not self._is_draining:
                self._is_draining = True
                self._outbox.send(Draining(incarnation=self._incarnation))
            has_work = self._engine.has_work
            if self._is_draining and not has_work and not (self._peers is not None and self._peers.is_busy):
                break
            messages = self._link.receive(0.0 if has_work else self._idle_s())
            if self._link.take_reconnected():
                for message in self._greeting:
                    self._outbox.send(message)
                if self._is_draining:
                    self._outbox.send(Draining(incarnation=self._incarnation))
            events = self._take_in(messages)
            if self._engine.has_work:
                events += self._engine.step()
                self.num_steps += 1
            self._talk_to_peers()
            self._report(events)
        self._outbox.send(Drained(incarnation=self._incarnation))

    def _take_in(self, messages: list[HeadToLead]) -> list[TokenEvent]:
        """Obeys the head; terminal events of requests that have ended by it."""
        events: list[TokenEvent] = []
        for message in messages:
            if message.incarnation != self._incarnation:
                self.num_stale += 1
                continue
            match message:
                case Submit():
                    event = self._add(message)
                    if event is not None:
                        events.append(event)
                case Abort(request_id=request_id, finish=finish):
                    event = self._engine.abort(request_id, finish)
                    if event is not None:
                        events.append(event)
                case Ping(number=number):
                    self._outbox.send(Pong(incarnation=self._incarnation, number=number))
                case TakeRoll():
                    self._outbox.tell_roll()
                case Resume(request_id=request_id, first=first):
                    self._outbox.resume(request_id, first)
                case Drain():
                    self._is_draining = True
                case FromPeer(replica_id=replica_id, peer_incarnation=number, message=said):
                    if self._peers is not None:
                        self._peers.receive(replica_id, number, said)
                    elif isinstance(said, AskBlocks):
                        refused = BlocksRefused(transfer=said.transfer, reason="kv_transfer is 'none' there")
                        self._tell_peer(replica_id, number, refused)
                case PeerGone(replica_id=replica_id, peer_incarnation=number, has_ended=has_ended):
                    if self._peers is not None:
                        self._peers.peer_gone(replica_id, number, has_ended)
                case _:
                    assert_never(message)
        return events

    def _idle_s(self) -> float:
        """How long there is nothing to do but to listen."""
        idle_s = min(MAX_IDLE_S, max(0.0, self._stats_timer.next_s - self._clock()))
        return min(idle_s, self._peers.wait_s) if self._peers is not None and self._peers.is_busy else idle_s

    def _talk_to_peers(self) -> None:
        if self._peers is not None:
            for (replica_id, number), message in self._peers.tick():
                self._tell_peer(replica_id, number, message)

    def _tell_peer(self, replica_id: str, number: int, message: PeerMessage) -> None:
        said = ToPeer(incarnation=self._incarnation, replica_id=replica_id, peer_incarnation=number, message=message)
        self._outbox.send(said)

    def _add(self, submit: Submit) -> TokenEvent | None:
        self._outbox.begin(submit)
        try:
            return self._engine.add(submit)
        except UserError as error:
            text, code = error.message, error.code
        except ProtocolError as error:
            logger.warning("refused %s: %s", submit.request_id, error)
            text, code = str(error), ""
        return TokenEvent(
            request_id=submit.request_id,
            first=len(submit.emitted_token_ids),
            token_ids=[],
            finish=FinishReason.ERROR,
            error=text,
            error_code=code,
        )

    def _report(self, events: list[TokenEvent]) -> None:
        now = self._clock()
        self._outbox.tell(events, now)
        self._outbox.tell_kv(self._engine.take_kv_events())
        if self._stats_timer.take(now, self._engine.has_work):
            stats = msgspec.structs.replace(self._engine.stats(), incarnation=self._incarnation)
            self._outbox.tell_stats(stats, now)
