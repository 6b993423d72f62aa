"""Open requests: admission, tokens back in order, and what becomes of them when a replica dies.

A request ends in exactly one terminal event, and each of its tokens is handed out once, whatever happens to the
replicas: what was emitted is in the journal, and an attempt that breaks off is followed by another that goes on after
it. Does not know sockets, HTTP, or why replicas come and go. Called by `cluster.head_gateway` (requests) and the head
(routes, leads' messages).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

import msgspec

from cluster.config import DeploymentConfig
from cluster.dispatcher import Dispatcher, LeadLink
from cluster.gateway import GenerateRequest
from cluster.held import Holder, Recovery
from cluster.journal import Journal, WireId
from cluster.open_request import OpenRequest, RequestCounters, news_of, terminal_event
from cluster.routing.routes import Route
from cluster.streams import RequestStream
from cluster.suspects import strike_all
from cluster.timelines import Timelines
from sonar.errors import CapacityError, UserError
from sonar.messages import FinishReason, KVEvents, KVFetchRecord, LeadReady, LeadStats, Roll, TokenEvent, Tokens

Clock = Callable[[], float]
# What a `Submit` may hold, so that it fits a frame of the transport also when as many tokens have been emitted: a token
# takes up to 5 bytes, a frame 16 MiB.
MAX_PROMPT_TOKENS = 1_000_000
MAX_SAMPLING_BYTES = 4 << 20


class RequestTable:
    """Owner of open requests and their streams.

    Args:
        clock: monotonic seconds.

    Attributes:
        recovery: begun by whoever knows that replicas of an earlier head may run, before the first request.
        timelines: what has happened to each request.
    """

    def __init__(self, journal: Journal, link: LeadLink, clock: Clock) -> None:
        self.counters = RequestCounters()
        self.recovery = Recovery(clock())
        self._journal = journal
        self._clock = clock
        self.timelines = Timelines()
        self._dispatcher = Dispatcher(journal, link, self.counters, self.timelines)
        self._routes = self._dispatcher.routes
        self._deployments: dict[str, DeploymentConfig] = {}
        self._open: dict[str, OpenRequest] = {}
        self._is_closed = False

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def num_waiting(self, deployment: str) -> int:
        """Requests of a deployment that no replica has."""
        return self._dispatcher.num_waiting(deployment)

    def routes(self) -> list[Route[OpenRequest]]:
        """The serving replicas, to be read only."""
        return list(self._routes)

    def set_deployments(self, deployments: Iterable[DeploymentConfig]) -> None:
        """What is served from now on. Requests for what is not finish where they are; those that wait end."""
        self._deployments = {config.model: config for config in deployments}
        moving = [c for c in self._deployments.values() if c.engine_config.kv_transfer != "none"]
        remote = {config.name: config.remote_prefill_tokens for config in moving}
        self._dispatcher.set_least_remote(remote)
        for config in self._deployments.values():
            self._routes.set_roles(config.name, config.is_prefill)
        self._fail_undeployed()

    def close_to_new(self) -> None:
        """The head stops: open requests go on, new ones are refused."""
        self._is_closed = True

    def end_recovery(self) -> None:
        """Every replica that runs has said what it has."""
        if self.recovery.has_begun:
            self.recovery.has_begun = False
            for config in self._deployments.values():
                self._dispatcher.release(config.name)

    def open(self, request: GenerateRequest, *, ignore_limit: bool = False) -> RequestStream:
        """Admits a request and sends it on its way.

        Raises:
            CapacityError: the queue is full, or the head is stopping.
            UserError: no such model, the id is in use, or the request is too large to be sent to a replica.
        """
        config = self._deployments.get(request.model)
        if config is None:
            raise UserError(f"model={request.model!r} is not deployed", param="model", code="model_not_found")
        if request.request_id in self._open:
            raise UserError(f"request_id={request.request_id!r} is in use; give another", param="request_id")
        _check_size(request)
        if self._is_closed:
            self.counters.refused += 1
            raise CapacityError("the server is stopping; ask another one", code="server_stopping")
        if not ignore_limit and self.num_waiting(config.name) >= config.max_queued:
            self.counters.refused += 1
            raise CapacityError(
                f"{config.max_queued} requests wait for {config.model} already; try again later", code="queue_full"
            )
        self.counters.accepted += 1
        entry = self._journal.admit(request)
        opened = OpenRequest(entry, config.name, RequestStream(), self._clock())
        opened.has_prompt_news = bool(entry.emitted_token_ids)
        self.timelines.note(request.request_id, _accepted(request))
        self._open[request.request_id] = opened
        opened.awaits_holder = self.recovery.has_begun and request.emitted_token_ids is not None
        self._dispatcher.put(opened, self._clock())
        if request.emitted_token_ids is not None:
            self._claim(opened)
        self._dispatcher.run(config.name)
        return opened.stream

    def abort(self, request_id: str, finish: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request at once, whatever its replica does; unknown ids are ignored."""
        request = self._open.get(request_id)
        if request is not None:
            self._dispatcher.withdraw(request)
            self._finish(request, terminal_event(request, finish))
            self._dispatcher.run(request.deployment)

    def fail_waiting(self, deployment: str, reason: str) -> None:
        """No replica will come: requests that wait for one end with an error."""
        for request in self._dispatcher.waiting(deployment):
            self._fail(request, reason)

    def tick(self) -> None:
        """About once a second: tries unreachable replicas again, ends requests that have waited too long."""
        now = self._clock()
        for route in self._routes:
            route.set_reachable(True)
        self._dispatcher.tick(now)
        for config in self._deployments.values():
            for request in self._dispatcher.waiting(config.name):
                if now - request.queued_s > config.queue_timeout_s:
                    self._fail(request, f"no replica of {config.model} took it within {config.queue_timeout_s:.0f} s")
            self._dispatcher.run(config.name)
        if now >= self.recovery.claim_until_s:
            for holder in self.recovery.held.take_all():
                self._abandon(holder)
        self._fail_undeployed()

    # --- replicas ---------------------------------------------------------------------------------------------------

    def open_route(
        self, replica_id: str, incarnation: int, deployment: str, ready: LeadReady, roll: Roll | None = None
    ) -> None:
        """A replica takes requests; those that waited for one go there.

        Args:
            roll: of one that has served an earlier head.
        """
        config = next((c for c in self._deployments.values() if c.name == deployment), None)
        is_prefill = config is not None and config.is_prefill(replica_id)
        route = self._routes.open(replica_id, incarnation, deployment, ready, is_prefill=is_prefill)
        if roll is not None:
            self._on_roll(route, roll)
        self._dispatcher.run(deployment)

    def drain_route(self, replica_id: str, incarnation: int) -> None:
        """A replica takes no new request."""
        route = self._routes.get(replica_id, incarnation)
        if route is not None:
            route.drain()

    def close_route(self, replica_id: str, incarnation: int, *, blames_requests: bool) -> bool:
        """A replica's incarnation is over: its requests wait for another, in their old order.

        Returns whether one of them was found to be the cause, and failed.
        """
        route = self._routes.get(replica_id, incarnation)
        if route is None:
            return False
        self._routes.close(route)
        self.recovery.held.forget(replica_id)
        now = self._clock()
        present = [attempt.request for attempt in route.attempts.values() if attempt.request is not None]
        convicted = strike_all([(r.strikes, r.num_emitted) for r in present]) if blames_requests else None
        for index, request in enumerate(present):
            if index == convicted:
                self.counters.convicted += 1
                self._fail(request, f"{request.strikes.count} replicas in a row died computing this request; given up")
            else:
                self._dispatcher.put_back(request, now)
        self._dispatcher.run(route.deployment)
        return convicted is not None

    def resync_route(self, replica_id: str, incarnation: int) -> None:
        """The connection was made anew: whatever was sent or said may be lost. The replica is asked what it has."""
        route = self._routes.get(replica_id, incarnation)
        if route is not None:
            route.next_sequence = None
            route.set_reachable(True)
            route.index.forget()
            self._dispatcher.ask_roll(route, self._clock())

    def on_message(self, replica_id: str, message: Tokens | KVEvents | LeadStats | Roll) -> bool:
        """What a serving lead says. False when its incarnation does not serve, or it has said that before."""
        route = self._routes.get(replica_id, message.incarnation)
        if route is None:
            return False
        match message:
            case Tokens():
                return self._on_tokens(route, message)
            case KVEvents():
                self.counters.sequence_gaps += not route.index.apply(message)
            case LeadStats():
                route.stats = message
            case Roll():
                self._on_roll(route, message)
            case _:
                assert_never(message)
        return True

    # --- inside -----------------------------------------------------------------------------------------------------

    def _on_roll(self, route: Route[OpenRequest], roll: Roll) -> None:
        """A replica says what it has. Attempts go on from where their clients are, or begin again if it has them not;
        what an earlier head had it compute is kept for who comes back for it."""
        route.next_sequence, route.roll_due_s = roll.next_sequence, 0.0
        now = self._clock()
        held = {request.request_id: request for request in roll.requests}
        for wire_id, attempt in list(route.attempts.items()):
            told = held.pop(wire_id, None)
            if told is None and attempt.is_after_roll_call:
                continue
            if attempt.request is None:
                if told is None or told.is_finished:
                    route.remove(wire_id)
                else:
                    self._dispatcher.abort(route, wire_id)
            elif told is not None and told.first <= attempt.request.num_emitted <= told.end:
                self._dispatcher.resume(route, wire_id, now)
            else:
                self._dispatcher.restart(route, [wire_id], now)
        for told in held.values():
            self.recovery.held.put(Holder(route.replica_id, roll.incarnation, told))
            opened = self._open.get(WireId.parse(told.request_id).request_id)
            if opened is not None and not opened.entry.replica_id:
                self._claim(opened)
        self._dispatcher.run(route.deployment)

    def _on_tokens(self, route: Route[OpenRequest], message: Tokens) -> bool:
        if route.next_sequence is not None and message.sequence < route.next_sequence:
            return False
        is_gap = route.next_sequence is not None and message.sequence > route.next_sequence
        route.next_sequence = message.sequence + 1
        if is_gap:
            # What was lost may have been an end, of any attempt.
            self.counters.sequence_gaps += 1
            self._dispatcher.ask_roll(route, self._clock())
        for event in message.events:
            self._on_event(route, event)
        if any(event.finish is not None for event in message.events):
            self._dispatcher.run(route.deployment)
        return True

    def _on_event(self, route: Route[OpenRequest], event: TokenEvent) -> None:
        attempt = route.attempts.get(event.request_id)
        if attempt is None:
            self.counters.late_events += 1
            return
        request = attempt.request
        if request is not None and event.first > request.num_emitted:
            # What is missing has been asked for, unless nobody has noticed so far.
            if not route.roll_due_s and not attempt.resume_due_s:
                self.counters.sequence_gaps += 1
                self._dispatcher.resume(route, event.request_id, self._clock())
            return
        if attempt.resume_due_s:
            attempt.resume_due_s = 0.0
            self.counters.resumed += 1
        route.saw_token(attempt)
        if event.finish is not None:
            route.remove(event.request_id)
        if request is not None:
            self.counters.repeated_tokens += min(request.num_emitted - event.first, len(event.token_ids))
            self._deliver(request, news_of(event, request))

    def _deliver(self, request: OpenRequest, event: TokenEvent) -> None:
        if event.kv_fetch is not None:
            self.timelines.note(event.request_id, _fetched(event.kv_fetch))
        if event.token_ids:
            self._journal.append(request.entry, event.token_ids)
            self.counters.tokens += len(event.token_ids)
            if not request.has_prompt_news:
                request.has_prompt_news = True
                cached = f"; {event.num_cached_tokens} prompt tokens were cached" if event.num_cached_tokens > 0 else ""
                self.timelines.note(event.request_id, f"first token{cached}")
            if request.broken_s is not None:
                pause_s = self._clock() - request.broken_s
                self.counters.count_pause(pause_s)
                request.broken_s = None
                self.timelines.note(event.request_id, f"goes on with token {event.first + 1} after {pause_s:.2f} s")
            if request.strikes.clear_by_progress(request.num_emitted):
                self._dispatcher.run(request.deployment)  # the next suspect may go
        if event.finish is not None:
            self._finish(request, event)
        elif event.token_ids:
            request.stream.push(event)

    def _claim(self, request: OpenRequest) -> None:
        """Has a waiting request go on at the replica that has it, if one does."""
        holder = self.recovery.held.take(request.entry.request.request_id, request.num_emitted)
        route = None if holder is None else self._routes.get(holder.replica_id, holder.incarnation)
        if holder is not None and route is not None:
            self._dispatcher.claim(route, holder.request.request_id, request, self._clock())

    def _abandon(self, holder: Holder) -> None:
        route = self._routes.get(holder.replica_id, holder.incarnation)
        if route is not None and not holder.request.is_finished:
            self.counters.abandoned += 1
            self._dispatcher.abort(route, holder.request.request_id)

    def _fail_undeployed(self) -> None:
        names = {config.name for config in self._deployments.values()}
        for name in {request.deployment for request in self._open.values()} - names:
            self.fail_waiting(name, f"{name} is not deployed any more")

    def _fail(self, request: OpenRequest, error: str) -> None:
        self._dispatcher.withdraw(request)
        self._finish(request, terminal_event(request, FinishReason.ERROR, error))

    def _finish(self, request: OpenRequest, event: TokenEvent) -> None:
        assert event.finish is not None and not request.is_done
        request.is_done = True
        del self._open[request.entry.request.request_id]
        num_tokens = request.num_emitted
        error = f": {event.error}" if event.error else ""
        self.timelines.end(
            request.entry.request.request_id, f"ended ({event.finish.value}), {num_tokens} tokens{error}"
        )
        self._journal.close(request.entry, event.finish)
        self.counters.finished[event.finish] += 1
        request.stream.push(event)


def _accepted(request: GenerateRequest) -> str:
    again = (
        "" if request.emitted_token_ids is None else f"; {len(request.emitted_token_ids)} tokens under an earlier head"
    )
    return f"accepted for {request.model}: {len(request.prompt_token_ids)} prompt tokens{again}"


def _fetched(fetch: KVFetchRecord) -> str:
    where = f"{fetch.replica_id} incarnation {fetch.incarnation}"
    text = (
        f"KV blocks of {fetch.tokens} tokens ({fetch.bytes_read / 2**20:.1f} MiB) came from {where}: "
        f"asked after {fetch.asked_s:.3f} s, the first could be read after {fetch.first_s:.3f} s, "
        f"done after {fetch.done_s:.3f} s"
    )
    return text + (f"; the rest was computed: {fetch.error}" if fetch.error else "")


def _check_size(request: GenerateRequest) -> None:
    count = len(request.prompt_token_ids)
    if count > MAX_PROMPT_TOKENS:
        raise UserError(f"the prompt has {count} tokens; at most {MAX_PROMPT_TOKENS} can be sent", param="prompt")
    size_bytes = len(msgspec.msgpack.encode(request.sampling))
    if size_bytes > MAX_SAMPLING_BYTES:
        raise UserError(
            f"the sampling settings take {size_bytes} bytes; shorten logit_bias or bad_words to {MAX_SAMPLING_BYTES}",
            param="logit_bias",
        )
