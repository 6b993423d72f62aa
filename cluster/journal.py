"""The journal of requests: what was asked, what has been handed out, and who computes it now.

What it holds is all that a request needs to go on elsewhere, for as long as its head lives. What has to outlive the
head is an answer with all its sequences, in the order in which their tokens were sent: `cluster.answer_journal` keeps
that, and a head that is started again admits the sequences with what they had emitted. Called by `cluster.requests`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cluster.gateway import GenerateRequest
from sonar.messages import FinishReason

ATTEMPTS_PER_HEAD = 1 << 20


@dataclass
class JournalEntry:
    """One request; owned by the journal and changed through it alone.

    Attributes:
        number: counts admissions; the order of equal priorities.
        emitted_token_ids: handed to the client, each once.
        replica_id, incarnation: who computes it; "" while it waits. attempt: number of the present or last one.
    """

    number: int
    request: GenerateRequest
    emitted_token_ids: list[int] = field(default_factory=list)
    replica_id: str = ""
    incarnation: int = 0
    attempt: int = 0

    @property
    def wire_id(self) -> str:
        """What the engine calls the present attempt. A number of its own each, so that words of an earlier one that
        was given up are never taken for this one's. Unique: an id ends at its last tilde."""
        return f"{self.request.request_id}~{self.attempt}"


class WireId(NamedTuple):
    """A wire id taken apart."""

    request_id: str
    attempt: int

    @classmethod
    def parse(cls, wire_id: str) -> WireId:
        """Of what any head has sent."""
        request_id, _, attempt = wire_id.rpartition("~")
        return cls(request_id, int(attempt))


class Journal(Protocol):
    """Keeper of open requests."""

    def admit(self, request: GenerateRequest) -> JournalEntry:
        """Writes a request down, with what an earlier head had emitted, before anything else is done for it."""
        ...

    def assign(self, entry: JournalEntry, replica_id: str, incarnation: int) -> None:
        """A new attempt begins there; replica_id "" takes the request back from where it was."""
        ...

    def adopt(self, entry: JournalEntry, replica_id: str, incarnation: int, wire_id: str) -> None:
        """An attempt that an earlier head began there is this request's from now on."""
        ...

    def append(self, entry: JournalEntry, token_ids: list[int]) -> None:
        """Tokens are about to be handed out."""
        ...

    def close(self, entry: JournalEntry, finish: FinishReason) -> None:
        """The request has ended; its entry can go."""
        ...

    def open_entries(self) -> list[JournalEntry]:
        """Requests that have not ended, oldest first."""
        ...


class MemoryJournal:
    """Implements `Journal` for as long as its head lives.

    Args:
        epoch: of the head; attempts of different heads never have the same number.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._last_number_before = epoch * ATTEMPTS_PER_HEAD
        self._entries: dict[int, JournalEntry] = {}
        self._next_number = 0

    def admit(self, request: GenerateRequest) -> JournalEntry:
        entry = JournalEntry(self._next_number, request, list(request.emitted_token_ids or ()))
        self._entries[entry.number] = entry
        self._next_number += 1
        return entry

    def assign(self, entry: JournalEntry, replica_id: str, incarnation: int) -> None:
        entry.replica_id, entry.incarnation = replica_id, incarnation
        if replica_id:
            entry.attempt = max(entry.attempt, self._last_number_before) + 1

    def adopt(self, entry: JournalEntry, replica_id: str, incarnation: int, wire_id: str) -> None:
        entry.replica_id, entry.incarnation = replica_id, incarnation
        entry.attempt = WireId.parse(wire_id).attempt

    def append(self, entry: JournalEntry, token_ids: list[int]) -> None:
        entry.emitted_token_ids.extend(token_ids)

    def close(self, entry: JournalEntry, finish: FinishReason) -> None:
        del self._entries[entry.number]

    def open_entries(self) -> list[JournalEntry]:
        return list(self._entries.values())
