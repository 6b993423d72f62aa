"""Records of `ClusterState`: nodes, replicas and their ranks, each a plain mutable dataclass owned by the state.

Only `cluster.state` and `cluster.replica_life` change them; others see `cluster.status`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from cluster.messages import HardwareFacts, WorkerRef
from cluster.placement import NodeView
from sonar.messages import LeadReady


class NodeState(Enum):
    """UP: takes part. LOST: silent for too long, or its agent ended; its workers count as dead."""

    UP = "up"
    LOST = "lost"


class ReplicaState(Enum):
    """Life of a replica; one incarnation lives from STARTING to the end of STOPPING.

    PLACING: waits for room. ADOPTING: workers that an earlier head started run; the rest of them, or their lead's word,
    is waited for. STARTING: workers are being spawned. LOADING: they run, the engine is being built. READY:
    takes requests. DRAINING: finishes open ones. STOPPING: killed or asked to end, exits awaited. BACKOFF: waits before
    the next start. FAILED: gave up (see `RestartPolicy`). STOPPED: gone, as wanted.
    """

    PLACING = "placing"
    ADOPTING = "adopting"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"
    STOPPED = "stopped"


# What an event of another replica or node may end: see `ReplicaRecord.pending`.
PENDING_STATES = frozenset({ReplicaState.PLACING, ReplicaState.BACKOFF, ReplicaState.STOPPED})
ALIVE_STATES = frozenset(
    {
        ReplicaState.ADOPTING,
        ReplicaState.STARTING,
        ReplicaState.LOADING,
        ReplicaState.READY,
        ReplicaState.DRAINING,
    }
)


@dataclass
class NodeRecord:
    """A host with an agent.

    Attributes:
        agent_id: of the agent's present start. agent_seen_s: its last sign of life; seen_s: the same with its leads'.
        is_drained: an operator wants no work there. is_leaving: its agent ends once its workers have.
        assigned: devices of the ranks of present incarnations that were placed there and are not known to have ended.
            Changed by `assign` and `release` only, held by `hold` and `release`.
        running: of these, the workers reported as running.
        clock_skew_s: of its clock against the head's, when it joined.
        probe_number, reach: last round of probes it answered, and what it found (see `PeersProbed`).
        held: devices of workers whose incarnation is over but whose exit was not reported; nothing is placed on them,
            and the agent is told to kill them again at kill_again_s.
    """

    node_id: str
    agent_id: int
    hardware: HardwareFacts
    versions: dict[str, str]
    agent_seen_s: float
    seen_s: float
    state: NodeState = NodeState.UP
    is_drained: bool = False
    is_leaving: bool = False
    clock_skew_s: float = 0.0
    probe_number: int = 0
    reach: dict[str, float] = field(default_factory=dict)
    note: str = ""
    assigned: dict[WorkerRef, tuple[int, ...]] = field(default_factory=dict)
    running: set[WorkerRef] = field(default_factory=set)
    held: dict[WorkerRef, tuple[int, ...]] = field(default_factory=dict)
    kill_again_s: float = 0.0
    _view: NodeView | None = None

    @property
    def takes_work(self) -> bool:
        """Whether ranks may be placed there, as far as is known."""
        return self.state is NodeState.UP and not self.is_drained and not self.is_leaving

    @property
    def view(self) -> NodeView:
        """As placement sees it."""
        if self._view is None:
            taken = {index for devices in (*self.assigned.values(), *self.held.values()) for index in devices}
            devices = self.hardware.devices
            free = tuple(device.index for device in devices if device.index not in taken)
            self._view = NodeView(self.node_id, len(devices), free, len(self.assigned))
        return self._view

    def assign(self, ref: WorkerRef, devices: tuple[int, ...]) -> None:
        """A rank was placed there."""
        self.assigned[ref] = devices
        self._view = None

    def hold(self, ref: WorkerRef, devices: tuple[int, ...]) -> None:
        """A worker may still be there that nobody wants."""
        self.held[ref] = devices
        self._view = None

    def release(self, ref: WorkerRef) -> None:
        """A worker has ended, or counts as ended."""
        self.assigned.pop(ref, None)
        self.held.pop(ref, None)
        self.running.discard(ref)
        self._view = None


@dataclass
class RankRecord:
    """A rank's worker. is_alive: not known to have ended (also while it is being spawned); pid 0 until it runs."""

    node_id: str
    devices: tuple[int, ...]
    pid: int = 0
    log_path: str = ""
    is_alive: bool = True


@dataclass
class StartProgress:
    """How far a start is. changed_s: when it last moved; a repeat of the same figures is no progress."""

    phase: str = ""
    done: int = 0
    total: int = 0
    changed_s: float = 0.0


@dataclass
class FailureRecord:
    """Failures in a row, and the last end of an incarnation.

    Attributes:
        by_node: where they happened. log_tail: last lines of the rank that ended first.
        is_permanent: the same start would fail again (the user's fault).
    """

    count: int = 0
    by_node: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    log_tail: str = ""
    is_permanent: bool = False


@dataclass
class IncarnationNumbers:
    """Which incarnation numbers replicas have had.

    Attributes:
        floor: an earlier head may have given any number up to it, to any replica.
        limit: no higher number is given; set by the shell as far as numbers are known to be new.
        given: replica id -> its latest number from this head.
    """

    floor: int
    limit: float = math.inf
    given: dict[str, int] = field(default_factory=dict)

    def latest(self, replica_id: str) -> int:
        """The highest number the replica may have had."""
        return self.given.get(replica_id, self.floor)


@dataclass
class ReplicaRecord:
    """One engine instance over all its incarnations.

    Attributes:
        num_ranks: of the present incarnation, also while not all of them are known.
        ask_s: when the lead of an adopted incarnation is asked (again) what it has.
        due_s: the deadline of ADOPTING, STARTING, DRAINING and STOPPING, or when the next start is due (BACKOFF,
            FAILED).
        since_s: when the state began. news_s: last word of the engine loop.
        step_expected_s: of the step that it computes, when that is a long one; else 0.
        note: why it waits, for people. is_routed: an OpenRoute has not been closed. is_wanted: it shall run.
        restart_up_to: incarnations up to this one are to be replaced, see `cluster.rolling_restart`.
        max_model_len: as the latest incarnation that was ready said; 0 before the first.
        pending: shared by all records of a cluster; those in PENDING_STATES, so that an event need not look at all.
    """

    replica_id: str
    deployment: str
    pending: dict[str, ReplicaRecord] = field(repr=False, compare=False)
    state: ReplicaState = ReplicaState.PLACING
    incarnation: int = 0
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    num_ranks: int = 0
    ask_s: float = math.inf
    is_adopted: bool = False
    since_s: float = 0.0
    due_s: float = math.inf
    news_s: float = 0.0
    step_expected_s: float = 0.0
    note: str = ""
    is_routed: bool = False
    is_wanted: bool = True
    was_ready: bool = False
    max_model_len: int = 0
    restart_up_to: int = 0
    ready: LeadReady | None = None
    progress: StartProgress = field(default_factory=StartProgress)
    failure: FailureRecord = field(default_factory=FailureRecord)

    @property
    def is_recovering(self) -> bool:
        """Whether it served, takes no requests now, and is on its way back."""
        away = (ReplicaState.READY, ReplicaState.FAILED, ReplicaState.STOPPED)
        return self.was_ready and self.is_wanted and self.state not in away

    def __post_init__(self) -> None:
        self.enter(self.state, self.since_s)

    def worker(self, rank: int) -> WorkerRef:
        """Name of a rank of the present incarnation."""
        return WorkerRef(replica_id=self.replica_id, incarnation=self.incarnation, rank=rank)

    def alive_ranks(self) -> list[tuple[int, RankRecord]]:
        """Ranks whose worker may still run."""
        return [(number, rank) for number, rank in self.ranks.items() if rank.is_alive]

    def enter(self, state: ReplicaState, now: float, due_s: float = math.inf) -> None:
        """Changes the state."""
        self.state, self.since_s, self.due_s = state, now, due_s
        if state in PENDING_STATES:
            self.pending[self.replica_id] = self
        else:
            self.pending.pop(self.replica_id, None)
