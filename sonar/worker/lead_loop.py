"""The engine loop of a lead: inbox, step, outbox, over and over, in one thread.

Synchronous: between two steps it takes what the head has sent, and after each it sends what came out. Idle, it waits on
the inbox. Without a head it computes on what it has: what came out is kept (`sonar.worker.outbox`) and told to the next
head that asks. How long it may, its agent decides. Knows no models and no signals; the engine and the link are handed
in. Called by `sonar.worker.lead`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, assert_never

import msgspec

from sonar.errors import ProtocolError, UserError
from sonar.messages import (
    Abort,
    Drain,
    Drained,
    Draining,
    FinishReason,
    HeadToLead,
    KVEvent,
    LeadHello,
    LeadReady,
    LeadStats,
    Ping,
    Pong,
    Resume,
    StepAhead,
    Submit,
    TakeRoll,
    TokenEvent,
)
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


class LeadLoop:
    """Runs an engine for a head.

    Args:
        hello, ready: said (again) when the connection was made anew.
        should_drain: asked between steps; true once the process was told to end.
        clock: monotonic seconds.

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
        self._next_stats_s = clock()
        self._was_busy = False
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
            self._next_stats_s = self._clock()  # which ends the head's patience once the step has ended
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
            if self._is_draining and not has_work:
                break
            idle_s = min(MAX_IDLE_S, max(0.0, self._next_stats_s - self._clock()))
            messages = self._link.receive(0.0 if has_work else idle_s)
            if self._link.take_reconnected():
                for message in self._greeting:
                    self._outbox.send(message)
                if self._is_draining:
                    self._outbox.send(Draining(incarnation=self._incarnation))
            events = self._take_in(messages)
            if self._engine.has_work:
                events += self._engine.step()
                self.num_steps += 1
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
                case _:
                    assert_never(message)
        return events

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
        now, is_busy = self._clock(), self._engine.has_work
        self._outbox.tell(events, now)
        self._outbox.tell_kv(self._engine.take_kv_events())
        if now >= self._next_stats_s or is_busy != self._was_busy:
            self._was_busy = is_busy
            self._next_stats_s = now + STATS_INTERVAL_S
            stats = msgspec.structs.replace(self._engine.stats(), incarnation=self._incarnation)
            self._outbox.tell_stats(stats, now)
