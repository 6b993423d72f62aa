"""Messages between leads: to present incarnations alone, and word of ends to those they concern."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.peer_relay import PeerRelay
from sonar.messages import FromPeer, HeadToLead, PeerGone, ToPeer
from sonar.peer_messages import ReleaseBlocks


@dataclass
class _World:
    """The link and the state, as the relay sees them. current: serving incarnations. running: with processes."""

    current: set[tuple[str, int]] = field(default_factory=set)
    running: set[tuple[str, int]] = field(default_factory=set)
    sent: list[tuple[str, int, HeadToLead]] = field(default_factory=list)

    def send_to_lead(self, replica_id: str, incarnation: int, message: HeadToLead) -> bool:
        assert message.incarnation == incarnation
        self.sent.append((replica_id, incarnation, message))
        return True

    def is_current(self, replica_id: str, incarnation: int) -> bool:
        return (replica_id, incarnation) in self.current

    def has_ended(self, replica_id: str, incarnation: int) -> bool:
        return (replica_id, incarnation) not in self.running

    def take(self) -> list[tuple[str, int, HeadToLead]]:
        sent, self.sent = self.sent, []
        return sent


def _relay() -> tuple[_World, PeerRelay]:
    world = _World({("p", 1), ("d", 1), ("e", 1)}, {("p", 1), ("d", 1), ("e", 1)})
    return world, PeerRelay(world, world)


def _say(number: int, to: str, incarnation: int) -> ToPeer:
    return ToPeer(
        incarnation=number, replica_id=to, peer_incarnation=incarnation, message=ReleaseBlocks(transfer=number)
    )


def test_a_message_reaches_the_incarnation_it_was_meant_for() -> None:
    world, relay = _relay()
    relay.carry("d", _say(1, "p", 1))
    assert world.take() == [
        ("p", 1, FromPeer(incarnation=1, replica_id="d", peer_incarnation=1, message=ReleaseBlocks(transfer=1)))
    ]
    relay.carry("d", _say(1, "p", 2))
    gone = PeerGone(incarnation=1, replica_id="p", peer_incarnation=2, has_ended=True)
    assert world.take() == [("d", 1, gone)]


def test_an_end_is_told_to_those_it_concerns_and_once_more_when_the_process_is_gone() -> None:
    world, relay = _relay()
    relay.carry("d", _say(1, "p", 1))
    relay.closed("e", 1)
    world.take()
    world.current.discard(("p", 1))
    relay.closed("p", 1)
    relay.tick()
    told = PeerGone(incarnation=1, replica_id="p", peer_incarnation=1, has_ended=False)
    assert world.take() == [("d", 1, told)]
    relay.carry("d", _say(1, "p", 1))
    assert world.take() == [("d", 1, told)], "whoever speaks to it hears the same"
    world.running.discard(("p", 1))
    relay.tick()
    relay.tick()
    ended = PeerGone(incarnation=1, replica_id="p", peer_incarnation=1, has_ended=True)
    assert world.take() == [("d", 1, ended)]
    world.running.discard(("d", 1))
    relay.closed("d", 1)
    assert world.take() == [], "its partner has ended before it"
