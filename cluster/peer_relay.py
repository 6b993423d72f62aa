"""Messages between leads, carried by the head: to the present incarnation alone, and word of peers that are gone.

Owns who has talked to whom, so that the end of a replica is told to those it concerns and no others. Knows nothing of
what is said (`sonar.peer_messages`). Called by `cluster.control`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cluster.dispatcher import LeadLink
from sonar.messages import FromPeer, PeerGone, ToPeer


class Incarnation(NamedTuple):
    """One start of a replica."""

    replica_id: str
    number: int


class Lives(Protocol):
    """What the relay asks of the cluster's state."""

    def is_current(self, replica_id: str, incarnation: int) -> bool:
        """Whether that incarnation serves."""
        ...

    def has_ended(self, replica_id: str, incarnation: int) -> bool:
        """Whether its processes are known, or taken, to have ended."""
        ...


class PeerRelay:
    """Owner of the pairs, and of the ends that are still to be told."""

    def __init__(self, link: LeadLink, lives: Lives) -> None:
        self._link = link
        self._lives = lives
        self._partners: dict[Incarnation, set[Incarnation]] = {}
        self._ending: set[Incarnation] = set()
        self.num_carried = 0

    def carry(self, replica_id: str, message: ToPeer) -> None:
        """A lead, of a present incarnation, says something to another."""
        sender = Incarnation(replica_id, message.incarnation)
        target = Incarnation(message.replica_id, message.peer_incarnation)
        lives = self._lives
        if not lives.is_current(*target):
            self._tell(sender, target, lives.has_ended(*target))
            return
        self._partners.setdefault(sender, set()).add(target)
        self._partners.setdefault(target, set()).add(sender)
        self.num_carried += 1
        said = FromPeer(
            incarnation=target.number,
            replica_id=sender.replica_id,
            peer_incarnation=sender.number,
            message=message.message,
        )
        self._link.send_to_lead(*target, said)

    def closed(self, replica_id: str, incarnation: int) -> None:
        """An incarnation serves no more."""
        gone = Incarnation(replica_id, incarnation)
        if gone in self._partners:
            self._ending.add(gone)
            self._tell_partners(gone, has_ended=False)
            self.tick()

    def tick(self) -> None:
        """Several times a second: those that have ended by now are told of once more, and forgotten."""
        for gone in list(self._ending):
            if self._lives.has_ended(*gone):
                self._ending.discard(gone)
                self._tell_partners(gone, has_ended=True)
                for partner in self._partners.pop(gone):
                    self._partners.get(partner, set()).discard(gone)

    def _tell_partners(self, gone: Incarnation, *, has_ended: bool) -> None:
        for partner in sorted(self._partners[gone]):
            self._tell(partner, gone, has_ended)

    def _tell(self, who: Incarnation, gone: Incarnation, has_ended: bool) -> None:
        told = PeerGone(
            incarnation=who.number, replica_id=gone.replica_id, peer_incarnation=gone.number, has_ended=has_ended
        )
        self._link.send_to_lead(*who, told)
