"""What `ClusterState` wants done, as plain data. The head's shell does it in order; the simulator and tests only look.

A command that cannot be carried out (a peer is gone) is dropped: the state learns the outcome by events and deadlines,
never by a command's result.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.messages import HeadToAgent
from sonar.messages import LeadReady, Roll


@dataclass(frozen=True)
class SendToAgent:
    """A message to one start of a node's agent."""

    node_id: str
    agent_id: int
    message: HeadToAgent


@dataclass(frozen=True)
class RecordIncarnation:
    """Make it durable, before the commands after it: no head may ever give this number to this replica again."""

    replica_id: str
    incarnation: int


@dataclass(frozen=True)
class OpenRoute:
    """The replica takes requests. roll: of one that has served an earlier head."""

    replica_id: str
    incarnation: int
    deployment: str
    ready: LeadReady
    roll: Roll | None = None


@dataclass(frozen=True)
class AskRoll:
    """The lead of an incarnation that an earlier head started is to say what it has."""

    replica_id: str
    incarnation: int


@dataclass(frozen=True)
class DrainRoute:
    """No new requests; those open on it go on. ask_lead: the lead has yet to be told."""

    replica_id: str
    incarnation: int
    ask_lead: bool


@dataclass(frozen=True)
class CloseRoute:
    """The incarnation is over: its open requests go elsewhere.

    blames_requests: whether one of them may have been the cause (a crash may; a lost host or an asked stop may not)."""

    replica_id: str
    incarnation: int
    blames_requests: bool
    reason: str


@dataclass(frozen=True)
class ResyncRoute:
    """The lead's connection was made anew: messages may have been lost both ways."""

    replica_id: str
    incarnation: int


@dataclass(frozen=True)
class Announce:
    """Something an operator should see in the log. is_failure: not by anyone's wish."""

    text: str
    is_failure: bool


Command = SendToAgent | RecordIncarnation | OpenRoute | AskRoll | DrainRoute | CloseRoute | ResyncRoute | Announce
