"""The engine loop of a lead: inbox, step, outbox, over and over, in one thread.

Synchronous: between two steps it takes what the head has sent, and after each it sends what came out. Idle, it waits on
the inbox. Knows no models and no signals; the engine and the link are handed in. Called by `sonar.worker.lead`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

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
    KVEvents,
    LeadHello,
    LeadReady,
    LeadStats,
    Ping,
    Pong,
    StepAhead,
    Submit,
    TokenEvent,
    Tokens,
)
from sonar.worker.step_forecast import StepForecast

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 1.0
# A signal does not end a wait on the inbox: an idle lead looks up this often. Four wake-ups a second cost nothing.
MAX_IDLE_S = 0.25


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


class Link(Protocol):
    """What the loop needs of its connection; `sonar.transport_client.Client` is one."""

    def send(self, message: msgspec.Struct) -> bool:
        """False when the queue is full."""
        ...

    def wait_writable(self, timeout_s: float) -> bool:
        """Waits until `send` would take a message."""
        ...

    def receive(self, timeout_s: float) -> list[Any]:
        """What has come; waits for a first message at most so long."""
        ...

    def take_reconnected(self) -> bool:
        """Whether the connection was made anew."""
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
        self._is_draining = False
        self._sequences = {"tokens": 0, "kv": 0}
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
            self._send(
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
                self._send(Draining(incarnation=self._incarnation))
            has_work = self._engine.has_work
            if self._is_draining and not has_work:
                break
            idle_s = min(MAX_IDLE_S, max(0.0, self._next_stats_s - self._clock()))
            messages = self._link.receive(0.0 if has_work else idle_s)
            if self._link.take_reconnected():
                for message in self._greeting:
                    self._send(message)
            events = self._take_in(messages)
            if self._engine.has_work:
                events += self._engine.step()
                self.num_steps += 1
            self._report(events)
        self._send(Drained(incarnation=self._incarnation))

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
                    self._send(Pong(incarnation=self._incarnation, number=number))
                case Drain():
                    self._is_draining = True
        return events

    def _add(self, submit: Submit) -> TokenEvent | None:
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
        if events:
            self._send(Tokens(incarnation=self._incarnation, sequence=self._count("tokens"), events=events))
        changes = self._engine.take_kv_events()
        if changes:
            self._send(KVEvents(incarnation=self._incarnation, sequence=self._count("kv"), events=changes))
        now, is_busy = self._clock(), self._engine.has_work
        if now >= self._next_stats_s or is_busy != self._was_busy:
            self._was_busy = is_busy
            self._next_stats_s = now + STATS_INTERVAL_S
            self._send(msgspec.structs.replace(self._engine.stats(), incarnation=self._incarnation))

    def _count(self, kind: str) -> int:
        number = self._sequences[kind]
        self._sequences[kind] = number + 1
        return number

    def _send(self, message: msgspec.Struct) -> None:
        """Sends, waiting while the queue is full: then the head has not read for long, and the engine rests too.

        Nothing is given up: a token event that is dropped would have to be computed again."""
        while not self._link.send(message):
            self._link.wait_writable(MAX_IDLE_S)
