"""Messages between a head and the agents of its hosts.

Frozen tagged msgspec structs of ids, ints, strings and bytes; one closed union a direction; MessagePack. No pickle, no
callable: a worker's engine is a name that the agent looks up in its own table. Torch-free. The links between head and
lead are in `sonar.messages`.

A `WorkerRef` carries the replica's incarnation; a report of an incarnation that is over is answered by `KillReplica`.
"""

from __future__ import annotations

import msgspec

from sonar.config import EngineConfig


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator. index: as the driver counts them."""

    index: int
    kind: str
    name: str
    memory_bytes: int
    uuid: str


class HardwareFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a host has, as far as this process may use it.

    Attributes:
        boot_id: changes with each boot; equal on two agents of one machine.
        cpu_cores: by affinity and cgroup quota. memory_bytes: of the host or the cgroup, whichever is less.
        addresses: "interface=address" of each interface that is up.
        interface, address: those that lead to the head, for all traffic between hosts. mtu: of that interface.
        disk_free_bytes: where the agent keeps logs.
    """

    hostname: str
    boot_id: str
    cpu_cores: int
    cpu_model: str
    memory_bytes: int
    memory_available_bytes: int
    devices: list[DeviceFacts]
    addresses: list[str]
    interface: str = ""
    address: str = ""
    mtu: int = 0
    disk_free_bytes: int = 0


class WorkerRef(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One rank of one incarnation of a replica."""

    replica_id: str
    incarnation: int
    rank: int = 0


class RunningWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that lives. devices: accelerators it holds. log_path: on its host. world_size, settings: as in the
    `StartWorker` that it was started by."""

    worker: WorkerRef
    pid: int
    devices: list[int]
    log_path: str
    world_size: int = 1
    settings: str = ""


# --- agent -> head --------------------------------------------------------------------------------------------------


class Register(_Message, frozen=True, kw_only=True):
    """Agent -> head: first message on each connection. Answered by `Registered` or `Refused`.

    Attributes:
        protocol: `sonar.transport.PROTOCOL_VERSION`; first, and never moved, so that skew can be named.
        versions: package -> version, "sonar" and "python" among them.
        running: workers that live on this host under this agent.
        unix_s: this host's clock.
    """

    protocol: int
    node_id: str
    pid: int
    versions: dict[str, str]
    hardware: HardwareFacts
    running: list[RunningWorker] = []
    unix_s: float = 0.0


class Heartbeat(_Message, frozen=True, kw_only=True):
    """Agent -> head: the agent's loop turns; no answer, but `RegisterAgain` if the head sees the agent otherwise.

    `running`: workers that live, so that no lost message can leave one behind unknown."""

    memory_available_bytes: int
    running: list[WorkerRef]


class WorkerStarted(_Message, frozen=True, kw_only=True):
    """Agent -> head: the process exists; answer to `StartWorker`. `log_path`: on that host."""

    worker: WorkerRef
    pid: int
    log_path: str


class StartFailed(_Message, frozen=True, kw_only=True):
    """Agent -> head: answer to `StartWorker` when there will be no process. `permanent`: trying again cannot help."""

    worker: WorkerRef
    error: str
    permanent: bool


class WorkerExited(_Message, frozen=True, kw_only=True):
    """Agent -> head: a worker's process has ended, whoever ended it, and its whole session with it; no answer.

    Attributes:
        exit_code: 0 or above; -1 when a signal ended it.
        signal: its number, 0 when it exited by itself.
        log_tail: the end of what it wrote, at most some 4 KB.
        was_asked: the head or the agent's own end had asked for it.
    """

    worker: WorkerRef
    pid: int
    exit_code: int
    signal: int
    log_tail: str
    was_asked: bool


class PeersProbed(_Message, frozen=True, kw_only=True):
    """Agent -> head: answer to `ProbePeers` of that number. seconds: node id -> until it answered; -1: it did not."""

    number: int
    seconds: dict[str, float]


class WantsToLeave(_Message, frozen=True, kw_only=True):
    """Agent -> head: its host is to be free soon; no answer. The head drains what runs there, starts nothing."""


class Leaving(_Message, frozen=True, kw_only=True):
    """Agent -> head: this agent ends, its workers have; last message."""

    reason: str


AgentToHead = Register | Heartbeat | WorkerStarted | StartFailed | WorkerExited | PeersProbed | WantsToLeave | Leaving


# --- head -> agent --------------------------------------------------------------------------------------------------


class Registered(_Message, frozen=True, kw_only=True):
    """Head -> agent: answer to `Register`: the host is a member. Heartbeats follow at the interval given.

    `head_loss_s`: without a head for so long, the agent ends its workers."""

    heartbeat_interval_s: float
    head_loss_s: float = 600.0


class Refused(_Message, frozen=True, kw_only=True):
    """Head -> agent: answer to `Register`, or later when another agent took the node over; the agent ends."""

    reason: str


class RegisterAgain(_Message, frozen=True, kw_only=True):
    """Head -> agent: answered by `Register`. The head does not know this agent (it was restarted, or took it for lost),
    or other workers run there than it thought.

    The workers live on until the head, having seen the list of them, says otherwise."""


class StartWorker(_Message, frozen=True, kw_only=True):
    """Head -> agent: start one rank. Answered by `WorkerStarted` or `StartFailed`.

    Attributes:
        world_size: ranks of the replica, over all hosts.
        devices: accelerators this rank alone uses; empty on a CPU.
        engine: key of the agent's table of engines.
        settings: digest of what the replica is started with, told again in `RunningWorker`.
    """

    worker: WorkerRef
    world_size: int
    devices: list[int]
    engine: str
    engine_config: EngineConfig
    settings: str = ""


class StopWorker(_Message, frozen=True, kw_only=True):
    """Head -> agent: SIGTERM (a lead drains), after `grace_s` SIGKILL to the session. Answered by `WorkerExited`."""

    worker: WorkerRef
    grace_s: float


class KillReplica(_Message, frozen=True, kw_only=True):
    """Head -> agent: SIGKILL every rank of that incarnation on this host, now. One `WorkerExited` each; none is fine.

    `dump_stacks`: have them write their threads' stacks to their logs first (a hang is to be explained)."""

    replica_id: str
    incarnation: int
    dump_stacks: bool = False


class ProbePeers(_Message, frozen=True, kw_only=True):
    """Head -> agent: try to reach these hosts directly. Answered by `PeersProbed`. peers: node id -> address."""

    number: int
    peers: dict[str, str]


class Shutdown(_Message, frozen=True, kw_only=True):
    """Head -> agent: stop all workers (SIGTERM, `grace_s`, SIGKILL), answer `Leaving`, end."""

    grace_s: float


HeadToAgent = Registered | Refused | RegisterAgain | StartWorker | StopWorker | KillReplica | ProbePeers | Shutdown
