"""What happens to a cluster, as `ClusterState.handle` takes it: plain data, no sockets, no clock.

Made by the head's shell from messages, process exits and time; by the simulator and tests from nothing. Messages that
say all there is are used as they are (`WorkerExited` and its like, `sonar.messages` of a lead).
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import DeploymentConfig
from cluster.messages import Register, StartFailed, WorkerExited, WorkerRef, WorkerStarted
from sonar.messages import Drained, Draining, Fault, LeadHello, LeadReady, LeadStats, LoadProgress, Roll, StepAhead


@dataclass(frozen=True)
class DeploymentApplied:
    """An operator wants this deployment, or another number of its replicas."""

    config: DeploymentConfig


@dataclass(frozen=True)
class DeploymentRemoved:
    """An operator wants it gone; its replicas drain."""

    name: str


@dataclass(frozen=True)
class RestartRequested:
    """An operator wants the replicas of a deployment started anew, one after the other."""

    deployment: str


@dataclass(frozen=True)
class NodeRegistered:
    """An agent said hello. agent_id: number of that start of the agent. skew_s: its clock less the head's."""

    agent_id: int
    register: Register
    skew_s: float = 0.0


@dataclass(frozen=True)
class AgentSpoke:
    """A heartbeat, with the workers that live there."""

    node_id: str
    agent_id: int
    running: tuple[WorkerRef, ...]


@dataclass(frozen=True)
class AgentReported:
    """An agent's report about one of its workers."""

    node_id: str
    agent_id: int
    report: WorkerStarted | StartFailed | WorkerExited


@dataclass(frozen=True)
class NodeGone:
    """An agent left, or its process is known to have ended (then its workers have too). reason: for the status."""

    node_id: str
    agent_id: int | None
    reason: str


LeadMessage = LeadHello | LoadProgress | LeadReady | Roll | LeadStats | StepAhead | Fault | Draining | Drained


@dataclass(frozen=True)
class LeadSpoke:
    """A lead's message about its engine's life (tokens do not pass here). incarnation: of the connection."""

    replica_id: str
    incarnation: int
    message: LeadMessage


@dataclass(frozen=True)
class FailureExplained:
    """A replica's last end was the fault of a request, which has been failed for it; the replica is excused."""

    replica_id: str


@dataclass(frozen=True)
class ProbeRequested:
    """An operator wants to know which hosts reach which. number: tells one such round from another."""

    number: int


@dataclass(frozen=True)
class PeersReached:
    """A node's part of a round. seconds: see `PeersProbed`."""

    node_id: str
    agent_id: int
    number: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class NodeLeaving:
    """An agent was told to end (its host goes away): no work for it, and what runs there drains."""

    node_id: str
    agent_id: int


@dataclass(frozen=True)
class NodeDrainRequested:
    """An operator wants no work on a node (or again: drain=False)."""

    node_id: str
    drain: bool = True


@dataclass(frozen=True)
class StopRequested:
    """The cluster ends: every replica drains, none is started any more."""


@dataclass(frozen=True)
class Tick:
    """Time has passed; several a second."""


Event = (
    DeploymentApplied
    | DeploymentRemoved
    | RestartRequested
    | NodeRegistered
    | AgentSpoke
    | AgentReported
    | NodeGone
    | NodeLeaving
    | ProbeRequested
    | PeersReached
    | LeadSpoke
    | FailureExplained
    | NodeDrainRequested
    | StopRequested
    | Tick
)
