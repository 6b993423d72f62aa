"""What replicas compute, or have computed, for a head that is gone, until the requests come back that it was for.

A client that comes back, or an answer that goes on by itself, takes its tokens over from here; what nobody has asked
for after a while is aborted by the owner (`cluster.requests`). Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from cluster.journal import WireId
from sonar.messages import HeldRequest

# After a head's start, for clients and answers of an earlier one to come back; by then their tokenizers are loaded.
CLAIM_S = 20.0


class Holder(NamedTuple):
    """Who has it, under which id."""

    replica_id: str
    incarnation: int
    request: HeldRequest

    @property
    def attempt(self) -> int:
        """The later of two attempts at one request has the higher number."""
        return WireId.parse(self.request.request_id).attempt


class HeldRequests:
    """Owner of what has not been claimed yet."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[Holder]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_id.values()))

    def put(self, holder: Holder) -> None:
        """A replica has it. Said again, the later word counts."""
        request_id = WireId.parse(holder.request.request_id).request_id
        others = [other for other in self._by_id.get(request_id, ()) if not _is_same(other, holder)]
        self._by_id[request_id] = [*others, holder]

    def take(self, request_id: str, num_emitted: int) -> Holder | None:
        """The latest attempt at a request that can be told from that token on; None when no replica has one."""
        holders = self._by_id.get(request_id, [])
        fitting = [h for h in holders if h.request.first <= num_emitted <= h.request.end]
        if not fitting:
            return None
        chosen = max(fitting, key=lambda holder: holder.attempt)
        holders.remove(chosen)
        return chosen

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        self._by_id = {
            request_id: left
            for request_id, holders in self._by_id.items()
            if (left := [holder for holder in holders if holder.replica_id != replica_id])
        }

    def take_all(self) -> list[Holder]:
        """What nobody came for."""
        holders = [holder for held in self._by_id.values() for holder in held]
        self._by_id.clear()
        return holders


class Recovery:
    """What a head takes over from an earlier one.

    Attributes:
        has_begun: not all replicas that may run have said what they have; requests of the earlier head wait for it.
        claim_until_s: after it, what replicas hold and nobody claims is aborted.
    """

    def __init__(self, now: float) -> None:
        self.held = HeldRequests()
        self.has_begun = False
        self.claim_until_s = now + CLAIM_S


def _is_same(one: Holder, other: Holder) -> bool:
    names = [(h.replica_id, h.incarnation, h.request.request_id) for h in (one, other)]
    return names[0] == names[1]
