"""The replicas that take requests, what is open on each, and the choice among them.

Owns the routes; `ClusterState` says when they open and close, `cluster.requests` what is sent over them. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster.routing.least_work import Candidate, Decision, choose_replica
from cluster.routing.prefix_index import PrefixIndex
from sonar.block_hash import hash_blocks
from sonar.messages import LeadReady, LeadStats

# Requests a replica holds per request it computes at once: enough that it never runs dry between two of the head's
# decisions, few enough that the rest wait where they can still go elsewhere.
OPEN_PER_SLOT = 2
MAX_SESSIONS = 10_000
R = TypeVar("R")


@dataclass
class Attempt(Generic[R]):
    """One request sent to one replica. request: None once it was given up and only the replica's last word is awaited.

    pending_tokens: its uncached prompt, until the first token is there."""

    request: R | None
    pending_tokens: int


@dataclass
class Route(Generic[R]):
    """A serving incarnation of a replica.

    Attributes:
        attempts: by wire id, in the order they were sent.
        next_sequence: number that the next `Tokens` must have; None accepts any (after a reconnect).
        is_reachable: the last message could be sent.
        pending_tokens: sum over the attempts.
    """

    replica_id: str
    incarnation: int
    deployment: str
    ready: LeadReady
    index: PrefixIndex
    attempts: dict[str, Attempt[R]] = field(default_factory=dict)
    next_sequence: int | None = 0
    is_draining: bool = False
    is_reachable: bool = True
    pending_tokens: int = 0
    stats: LeadStats | None = None

    @property
    def has_room(self) -> bool:
        """Whether one more request may be sent."""
        is_open = self.is_reachable and not self.is_draining
        return is_open and len(self.attempts) < OPEN_PER_SLOT * self.ready.max_num_requests

    def add(self, wire_id: str, request: R, pending_tokens: int) -> None:
        """A request was sent there."""
        self.attempts[wire_id] = Attempt(request, pending_tokens)
        self.pending_tokens += pending_tokens

    def saw_token(self, attempt: Attempt[R]) -> None:
        """Its prompt has been computed."""
        self.pending_tokens -= attempt.pending_tokens
        attempt.pending_tokens = 0

    def remove(self, wire_id: str) -> Attempt[R] | None:
        """An attempt is over."""
        attempt = self.attempts.pop(wire_id, None)
        if attempt is not None:
            self.saw_token(attempt)
        return attempt


class RouteTable(Generic[R]):
    """Owner of the routes and of the sessions' last places."""

    def __init__(self) -> None:
        self._routes: dict[str, Route[R]] = {}
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __iter__(self) -> Iterator[Route[R]]:
        return iter(list(self._routes.values()))

    def open(self, replica_id: str, incarnation: int, deployment: str, ready: LeadReady) -> Route[R]:
        """A replica takes requests from now on."""
        assert replica_id not in self._routes, replica_id
        route: Route[R] = Route(replica_id, incarnation, deployment, ready, PrefixIndex(ready.num_blocks))
        self._routes[replica_id] = route
        return route

    def get(self, replica_id: str, incarnation: int) -> Route[R] | None:
        """None when that incarnation does not serve (any more)."""
        route = self._routes.get(replica_id)
        return route if route is not None and route.incarnation == incarnation else None

    def close(self, route: Route[R]) -> None:
        """The incarnation is over."""
        del self._routes[route.replica_id]

    def of(self, deployment: str) -> list[Route[R]]:
        """A deployment's routes, draining ones too."""
        return [route for route in self._routes.values() if route.deployment == deployment]

    def choose(
        self, deployment: str, token_ids: list[int], cache_salt: str, session: str
    ) -> tuple[Route[R], Decision] | None:
        """The route to send a request over; None when no replica has room."""
        routes = [route for route in self.of(deployment) if route.has_room]
        if not routes:
            return None
        # With one replica there is nothing to weigh: the hashing (about 0.5 us a block) is saved.
        hashes = {size: hash_blocks(token_ids, size, cache_salt) for size in _block_sizes(routes)}
        last = self._sessions.get((deployment, session)) if session else None
        candidates = [_candidate(route, hashes, last) for route in routes]
        decision = choose_replica(len(token_ids), candidates)
        chosen = self._routes[decision.replica_id]
        if session:
            self._remember(deployment, session, chosen.replica_id)
        return chosen, decision

    def _remember(self, deployment: str, session: str, replica_id: str) -> None:
        self._sessions[deployment, session] = replica_id
        self._sessions.move_to_end((deployment, session))
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


def _block_sizes(routes: list[Route[R]]) -> set[int]:
    return {route.ready.block_size for route in routes} if len(routes) > 1 else set()


def _candidate(route: Route[R], hashes: dict[int, list[bytes]], session_replica: str | None) -> Candidate:
    size = route.ready.block_size
    return Candidate(
        replica_id=route.replica_id,
        cached_tokens=size * route.index.count_prefix(hashes.get(size, [])),
        pending_tokens=route.pending_tokens,
        num_open=len(route.attempts),
        max_num_requests=route.ready.max_num_requests,
        has_session=route.replica_id == session_replica,
    )
