"""Requests that wait for a replica, and their sending: queues by deployment, order, routes, attempts.

Owns queues and routes; every attempt begins and ends here, in the journal and at the replica. Does not see events or
decide why an attempt ends (`cluster.requests`, its only caller).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from cluster.journal import Journal
from cluster.open_request import OpenRequest, RequestCounters
from cluster.routing.least_work import Decision
from cluster.routing.routes import Route, RouteTable
from cluster.timelines import Timelines
from sonar.messages import Abort, HeadToLead, KVSource, Resume, Submit, TakeRoll

# Until a replica is asked again what it has; and until an attempt is given up whose tokens it was asked for.
ROLL_S = 1.0
RESUME_S = 5.0


class LeadLink(Protocol):
    """How messages get to leads."""

    def send_to_lead(self, replica_id: str, incarnation: int, message: HeadToLead) -> bool:
        """False when it could not be sent at all."""
        ...


_Queue = list[tuple[tuple[int, int], OpenRequest]]


class _Source(NamedTuple):
    """A replica that computes a prompt for another, or has so many tokens of it cached."""

    route: Route[OpenRequest]
    least_tokens: int
    cached_tokens: int = 0

    @property
    def message(self) -> KVSource:
        """As the other is told."""
        return KVSource(
            replica_id=self.route.replica_id,
            incarnation=self.route.incarnation,
            least_tokens=self.least_tokens,
            cached_tokens=self.cached_tokens,
        )


class Dispatcher:
    """Owner of the waiting requests and of the routes."""

    def __init__(self, journal: Journal, link: LeadLink, counters: RequestCounters, timelines: Timelines) -> None:
        self.routes: RouteTable[OpenRequest] = RouteTable()
        self._journal = journal
        self._link = link
        self._counters = counters
        self._timelines = timelines
        self._queues: dict[str, _Queue] = {}
        self._least_remote: dict[str, int] = {}
        self._resuming: deque[tuple[float, Route[OpenRequest], str]] = deque()

    def set_least_remote(self, least: dict[str, int]) -> None:
        """Per deployment, how many tokens of a prompt have to be missing for another replica to compute it."""
        self._least_remote = least

    def num_waiting(self, deployment: str) -> int:
        """Requests of a deployment that no replica has."""
        return len(self._queues.get(deployment, ()))

    def waiting(self, deployment: str) -> list[OpenRequest]:
        """The same requests, in no order."""
        return [request for _, request in self._queues.get(deployment, ())]

    def put(self, request: OpenRequest, now: float) -> None:
        """Queues a request; `run` sends it."""
        request.queued_s = now
        heapq.heappush(self._queues.setdefault(request.deployment, []), (request.order, request))

    def put_back(self, request: OpenRequest, now: float) -> None:
        """A request's attempt broke off: it waits again, ahead of those admitted after it."""
        entry = request.entry
        where = f"{entry.replica_id} incarnation {entry.incarnation}"
        self._note(request, f"its attempt at {where} is over after {request.num_emitted} tokens; waits for a replica")
        self._journal.assign(request.entry, "", 0)
        self._counters.migrations += 1
        request.broken_s = request.broken_s or now
        self.put(request, now)

    def withdraw(self, request: OpenRequest) -> None:
        """Takes a request that has ended out of its queue, or from its replica.

        There the attempt counts as load until the replica has said its last word on it."""
        entry = request.entry
        if not entry.replica_id:
            queue = self._queues.get(request.deployment, [])
            self._queues[request.deployment] = [item for item in queue if item[1] is not request]
            heapq.heapify(self._queues[request.deployment])
            return
        route = self.routes.get(entry.replica_id, entry.incarnation)
        attempt = route.attempts.get(entry.wire_id) if route else None
        if route is not None and attempt is not None:
            attempt.request = None
            self._send_abort(route, entry.wire_id)

    def restart(self, route: Route[OpenRequest], wire_ids: Iterable[str], now: float) -> None:
        """Gives attempts up whose messages may be lost; their requests begin another one."""
        for wire_id in list(wire_ids):
            attempt = route.remove(wire_id)
            if attempt is not None:
                self._send_abort(route, wire_id)
                if attempt.request is not None:
                    self.put_back(attempt.request, now)

    def ask_roll(self, route: Route[OpenRequest], now: float) -> None:
        """Has a replica say what it computes; the answer comes with `RequestTable.on_message`. Until then tokens may
        begin after a gap."""
        route.roll_due_s = now + ROLL_S
        for attempt in route.attempts.values():
            attempt.is_after_roll_call = False
        self._link.send_to_lead(route.replica_id, route.incarnation, TakeRoll(incarnation=route.incarnation))

    def resume(self, route: Route[OpenRequest], wire_id: str, now: float) -> None:
        """Has a replica tell an attempt's tokens again, from where the client is."""
        attempt = route.attempts[wire_id]
        assert attempt.request is not None, wire_id
        attempt.resume_due_s = now + RESUME_S
        num_seen = attempt.request.num_emitted
        self._note(attempt.request, f"{route.replica_id} is asked to tell what follows token {num_seen} again")
        self._resuming.append((attempt.resume_due_s, route, wire_id))
        message = Resume(incarnation=route.incarnation, request_id=wire_id, first=attempt.request.num_emitted)
        if not self._link.send_to_lead(route.replica_id, route.incarnation, message):
            self.restart(route, [wire_id], now)

    def claim(self, route: Route[OpenRequest], wire_id: str, request: OpenRequest, now: float) -> None:
        """A waiting request is found to be computed by a replica already, for an earlier head: it goes on there."""
        self.withdraw(request)
        request.awaits_holder = False
        self._journal.adopt(request.entry, route.replica_id, route.incarnation, wire_id)
        route.add(wire_id, request, 0)
        self.resume(route, wire_id, now)

    def tick(self, now: float) -> None:
        """Asks again, and gives up attempts whose tokens did not come."""
        for route in self.routes:
            if route.roll_due_s and now >= route.roll_due_s:
                self.ask_roll(route, now)
        while self._resuming and now >= self._resuming[0][0]:
            due_s, route, wire_id = self._resuming.popleft()
            attempt = route.attempts.get(wire_id)
            if attempt is not None and attempt.resume_due_s == due_s:
                self.restart(route, [wire_id], now)

    def release(self, deployment: str) -> None:
        """No replica is going to say that it has one of the waiting requests."""
        for request in self.waiting(deployment):
            request.awaits_holder = False
        self.run(deployment)

    def abort(self, route: Route[OpenRequest], wire_id: str) -> None:
        """Has a replica end what nobody reads."""
        self._send_abort(route, wire_id)

    def run(self, deployment: str) -> None:
        """Sends waiting requests to replicas with room, in order; of the suspects one at a time."""
        queue = self._queues.get(deployment, [])
        held: _Queue = []
        while queue:
            item = heapq.heappop(queue)
            request = item[1]
            if request.awaits_holder or (request.strikes.is_suspect and self._has_suspect(deployment)):
                held.append(item)
            elif not self._send(request):
                held.append(item)
                break
        for item in held:
            heapq.heappush(queue, item)

    def _has_suspect(self, deployment: str) -> bool:
        attempts = (attempt for route in self.routes.of(deployment) for attempt in route.attempts.values())
        return any(a.request is not None and a.request.strikes.is_suspect for a in attempts)

    def _send(self, request: OpenRequest) -> bool:
        """Sends a request to the best replica; False when none takes it now."""
        entry = request.entry
        asked, emitted = entry.request, entry.emitted_token_ids
        tokens = asked.prompt_token_ids + emitted
        while chosen := self.routes.choose(request.deployment, tokens, asked.cache_salt, asked.session):
            route, decision = chosen
            uncached = decision.scores[0].uncached
            source = self._choose_source(request, tokens, route, uncached)
            self._journal.assign(entry, route.replica_id, route.incarnation)
            submit = Submit(
                incarnation=route.incarnation,
                request_id=entry.wire_id,
                prompt_token_ids=asked.prompt_token_ids,
                sampling=asked.sampling,
                emitted_token_ids=list(emitted),
                priority=asked.priority,
                cache_salt=asked.cache_salt,
                kv_source=source and source.message,
            )
            if self._link.send_to_lead(route.replica_id, route.incarnation, submit):
                if source is not None and source.cached_tokens:
                    route.add(entry.wire_id, request, max(1, len(tokens) - source.cached_tokens))
                else:
                    route.add(entry.wire_id, request, uncached, source and source.route)
                self._counters.tokens_replayed += len(emitted)
                self._note(request, _sent(route, source, decision, len(tokens)))
                return True
            route.set_reachable(False)
        self._journal.assign(entry, "", 0)
        return False

    def _choose_source(
        self, request: OpenRequest, tokens: list[int], to: Route[OpenRequest], uncached: int
    ) -> _Source | None:
        """Where the prompt's KV blocks are to come from, if not from the replica that gets the request: who computes
        prompts for it, or who has most of this one cached."""
        asked = request.entry.request
        least = self._least_remote.get(request.deployment, 0)
        if not least or uncached < least or asked.sampling.prompt_logprobs is not None:
            return None
        helper = self.routes.choose_helper(request.deployment, tokens, asked.cache_salt, to)
        if helper is not None:
            return _Source(helper[0], least)
        holder = self.routes.choose_holder(request.deployment, tokens, asked.cache_salt, to)
        if holder is None or holder[1] - (len(tokens) - uncached) < least:
            return None
        return _Source(holder[0], least, holder[1])

    def _note(self, request: OpenRequest, text: str) -> None:
        self._timelines.note(request.entry.request.request_id, text)

    def _send_abort(self, route: Route[OpenRequest], wire_id: str) -> None:
        abort = Abort(incarnation=route.incarnation, request_id=wire_id)
        self._link.send_to_lead(route.replica_id, route.incarnation, abort)


def _sent(route: Route[OpenRequest], source: _Source | None, decision: Decision, num_tokens: int) -> str:
    best, *others = decision.scores
    text = f"sent to {route.replica_id} incarnation {route.incarnation}"
    text += f": {best.uncached} of {num_tokens} tokens to compute"
    if source is not None:
        text += f", with the KV blocks of {source.route.replica_id}"
    rest = ", ".join(f"{score.replica_id} {score.total}" for score in others[:3])
    return f"{text}; cost {best.total}" + (f" against {rest}" if rest else "")
