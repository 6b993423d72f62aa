"""The replicas that take requests, what is open on each, and the choice among them.

Owns the routes; `ClusterState` says when they open and close, `cluster.requests` what is sent over them. Pure. Of many
replicas only those that can be best are weighed: what a decision costs does not grow with the cluster.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster.routing.least_work import Candidate, Decision, choose_replica, standing_load
from cluster.routing.load_order import LoadOrder
from cluster.routing.prefix_index import BlockHolders, PrefixIndex
from sonar.block_hash import hash_blocks
from sonar.messages import LeadReady, LeadStats

# Requests a replica holds per request it computes at once: enough that it never runs dry between two of the head's
# decisions, few enough that the rest wait where they can still go elsewhere.
OPEN_PER_SLOT = 2
MAX_SESSIONS = 10_000
# Replicas weighed in one decision: all when there are so few; else the session's, those that hold most of the prompt,
# and the least loaded. What is left out holds less and has more to do than one of these.
WEIGH_ALL = 16
MAX_HOLDERS = 16
NUM_LEAST_LOADED = 8
R = TypeVar("R")


@dataclass
class Attempt(Generic[R]):
    """One request sent to one replica. request: None once it was given up and only the replica's last word is awaited.

    pending_tokens: its uncached prompt, until the first token is there. helper: the replica that computes the prompt,
    if that is another one, where those tokens count.
    resume_due_s: when it is given up unless its tokens, which the replica was asked to tell again, have come; 0 when
    nothing is asked.
    is_after_roll_call: sent after the replica was asked what it has, so that its answer may not name it."""

    request: R | None
    pending_tokens: int
    helper: Route[R] | None = None
    resume_due_s: float = 0.0
    is_after_roll_call: bool = False


@dataclass
class Route(Generic[R]):
    """A serving incarnation of a replica.

    Attributes:
        order: of its pool's routes; kept by the methods that change what is open here.
        attempts: by wire id, in the order they were sent.
        next_sequence: number that the next `Tokens` must have; None accepts any (after a reconnect).
        is_reachable: the last message could be sent. is_draining: no new request.
        roll_due_s: when the replica is asked again what it has; 0 when that is known.
        pending_tokens: sum over the attempts.
    """

    replica_id: str
    incarnation: int
    deployment: str
    ready: LeadReady
    index: PrefixIndex
    order: LoadOrder
    attempts: dict[str, Attempt[R]] = field(default_factory=dict)
    next_sequence: int | None = 0
    is_draining: bool = False
    is_reachable: bool = True
    roll_due_s: float = 0.0
    pending_tokens: int = 0
    stats: LeadStats | None = None

    def __post_init__(self) -> None:
        self._reorder()

    @property
    def has_room(self) -> bool:
        """Whether one more request may be sent."""
        is_open = self.is_reachable and not self.is_draining
        return is_open and len(self.attempts) < OPEN_PER_SLOT * self.ready.max_num_requests

    def drain(self) -> None:
        """It takes no new request any more."""
        self.is_draining = True
        self._reorder()

    def set_reachable(self, is_reachable: bool) -> None:
        """Whether a message could be sent, or is to be tried again."""
        if self.is_reachable != is_reachable:
            self.is_reachable = is_reachable
            self._reorder()

    def move_to(self, order: LoadOrder) -> None:
        """It belongs to another pool now."""
        if order is not self.order:
            self.order.remove(self.replica_id)
            self.order = order
            self._reorder()

    def add(self, wire_id: str, request: R, pending_tokens: int, helper: Route[R] | None = None) -> None:
        """A request was sent there."""
        is_after_roll_call = self.roll_due_s > 0
        self.attempts[wire_id] = Attempt(request, pending_tokens, helper, is_after_roll_call=is_after_roll_call)
        (helper or self).add_pending(pending_tokens)
        self._reorder()

    def add_pending(self, num_tokens: int) -> None:
        """There is so much more of prompts to compute, or less."""
        self.pending_tokens += num_tokens
        self._reorder()

    def saw_token(self, attempt: Attempt[R]) -> None:
        """Its prompt has been computed."""
        if attempt.pending_tokens:
            (attempt.helper or self).add_pending(-attempt.pending_tokens)
            attempt.pending_tokens = 0

    def remove(self, wire_id: str) -> Attempt[R] | None:
        """An attempt is over."""
        attempt = self.attempts.pop(wire_id, None)
        if attempt is not None:
            self.saw_token(attempt)
            self._reorder()
        return attempt

    def _reorder(self) -> None:
        if self.has_room:
            self.order.put(self.replica_id, standing_load(self.as_candidate()))
        else:
            self.order.remove(self.replica_id)

    def as_candidate(self, cached_tokens: int = 0, has_session: bool = False) -> Candidate:
        """What the choice is to know of it."""
        return Candidate(
            replica_id=self.replica_id,
            cached_tokens=cached_tokens,
            pending_tokens=self.pending_tokens,
            num_open=len(self.attempts),
            max_num_requests=self.ready.max_num_requests,
            has_session=has_session,
        )


@dataclass
class _Group(Generic[R]):
    """One deployment's routes.

    Attributes:
        order: of those that requests are sent to. prefill: of those that compute prompts for these.
        block_sizes: how many have each.
    """

    routes: dict[str, Route[R]] = field(default_factory=dict)
    order: LoadOrder = field(default_factory=LoadOrder)
    prefill: LoadOrder = field(default_factory=LoadOrder)
    holders: BlockHolders = field(default_factory=BlockHolders)
    block_sizes: Counter[int] = field(default_factory=Counter)

    def candidates(self, order: LoadOrder, hashes: dict[int, list[bytes]], session_replica: str | None) -> list[str]:
        """The replicas of a pool, with room, that can be the best."""
        if len(order) <= WEIGH_ALL:
            return list(order)
        chosen = dict.fromkeys(order.least(NUM_LEAST_LOADED))
        if session_replica is not None and session_replica in order:
            chosen[session_replica] = None
        for chain in hashes.values():
            chosen.update(dict.fromkeys(self._holders_of(order, chain)))
        return list(chosen)

    def _holders_of(self, order: LoadOrder, chain: Sequence[bytes]) -> list[str]:
        """Replicas with room that hold most of a prompt: from its last block back until there are enough."""
        found: dict[str, None] = {}
        for block_hash in reversed(chain):
            holders = self.holders.of(block_hash)
            if holders and not holders <= found.keys():
                found.update(dict.fromkeys(order.least_of(holders, MAX_HOLDERS - len(found), found)))
                if len(found) >= MAX_HOLDERS:
                    break
        return list(found)


class RouteTable(Generic[R]):
    """Owner of the routes and of the sessions' last places."""

    def __init__(self) -> None:
        self._routes: dict[str, Route[R]] = {}
        self._groups: dict[str, _Group[R]] = {}
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __iter__(self) -> Iterator[Route[R]]:
        return iter(list(self._routes.values()))

    def open(
        self, replica_id: str, incarnation: int, deployment: str, ready: LeadReady, *, is_prefill: bool = False
    ) -> Route[R]:
        """A replica takes requests from now on.

        Args:
            is_prefill: it computes prompts for the others; requests are sent to it only when none of those has room.
        """
        assert replica_id not in self._routes, replica_id
        group = self._groups.setdefault(deployment, _Group())
        index = PrefixIndex(replica_id, ready.num_blocks, group.holders)
        route: Route[R] = Route(
            replica_id, incarnation, deployment, ready, index, group.prefill if is_prefill else group.order
        )
        self._routes[replica_id] = group.routes[replica_id] = route
        group.block_sizes[ready.block_size] += 1
        return route

    def get(self, replica_id: str, incarnation: int) -> Route[R] | None:
        """None when that incarnation does not serve (any more)."""
        route = self._routes.get(replica_id)
        return route if route is not None and route.incarnation == incarnation else None

    def close(self, route: Route[R]) -> None:
        """The incarnation is over."""
        group = self._groups[route.deployment]
        route.index.forget()
        route.drain()  # it is in no order any more, whatever is told of attempts that it helps with
        group.block_sizes -= Counter((route.ready.block_size,))
        del self._routes[route.replica_id], group.routes[route.replica_id]
        if not group.routes:
            del self._groups[route.deployment]

    def of(self, deployment: str) -> list[Route[R]]:
        """A deployment's routes, draining ones too."""
        group = self._groups.get(deployment)
        return list(group.routes.values()) if group else []

    def choose(
        self, deployment: str, token_ids: list[int], cache_salt: str, session: str
    ) -> tuple[Route[R], Decision] | None:
        """The route to send a request over; None when no replica has room."""
        group = self._groups.get(deployment)
        order = group and (group.order if len(group.order) else group.prefill)
        if group is None or not order:
            return None
        # With one replica there is nothing to weigh: the hashing (about 0.5 us a block) is saved.
        sizes = group.block_sizes if len(group.routes) > 1 else ()
        hashes = {size: hash_blocks(token_ids, size, cache_salt) for size in sizes}
        last = self._sessions.get((deployment, session)) if session else None
        routes = [group.routes[replica_id] for replica_id in group.candidates(order, hashes, last)]
        decision = choose_replica(len(token_ids), [_candidate(route, hashes, last) for route in routes])
        chosen = self._routes[decision.replica_id]
        if session:
            self._remember(deployment, session, chosen.replica_id)
        return chosen, decision

    def choose_helper(
        self, deployment: str, token_ids: list[int], cache_salt: str, to: Route[R]
    ) -> tuple[Route[R], Decision] | None:
        """The route of a replica that is to compute a prompt for another; None when there is none, or none with room,
        or that other one computes prompts itself."""
        group = self._groups.get(deployment)
        if group is None or not len(group.prefill) or to.order is group.prefill:
            return None
        hashes = {to.ready.block_size: hash_blocks(token_ids, to.ready.block_size, cache_salt)}
        names = group.candidates(group.prefill, hashes, None)
        decision = choose_replica(len(token_ids), [_candidate(group.routes[name], hashes, None) for name in names])
        return self._routes[decision.replica_id], decision

    def choose_holder(
        self, deployment: str, token_ids: list[int], cache_salt: str, to: Route[R]
    ) -> tuple[Route[R], int] | None:
        """The route of the replica that has most of a prompt cached, of those like `to`, and how many tokens of it."""
        group = self._groups.get(deployment)
        if group is None or len(group.routes) < 2:
            return None
        chain = hash_blocks(token_ids, to.ready.block_size, cache_salt)
        names = group.candidates(to.order, {to.ready.block_size: chain}, None)
        found = [(group.routes[name].index.count_prefix(chain), name) for name in names if name != to.replica_id]
        count, name = max(found, default=(0, ""))
        return (group.routes[name], count * to.ready.block_size) if count else None

    def set_roles(self, deployment: str, is_prefill: Callable[[str], bool]) -> None:
        """Which replicas compute prompts for the others, from now on; what is open goes on as it was sent."""
        group = self._groups.get(deployment)
        for replica_id, route in group.routes.items() if group else ():
            assert group is not None
            route.move_to(group.prefill if is_prefill(replica_id) else group.order)

    def _remember(self, deployment: str, session: str, replica_id: str) -> None:
        self._sessions[deployment, session] = replica_id
        self._sessions.move_to_end((deployment, session))
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


def _candidate(route: Route[R], hashes: dict[int, list[bytes]], session_replica: str | None) -> Candidate:
    size = route.ready.block_size
    cached_tokens = size * route.index.count_prefix(hashes.get(size, []))
    return route.as_candidate(cached_tokens, route.replica_id == session_replica)
