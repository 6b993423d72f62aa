"""The state of a cluster for people and programs: one snapshot, plain structs that encode to JSON as they are.

Made from `ClusterState` and the request table by the head; read by the launcher's output, the API and tests.
"""

from __future__ import annotations

import msgspec

from cluster.records import NodeRecord, ReplicaRecord, ReplicaState
from cluster.requests import RequestTable
from cluster.state import ClusterState
from sonar.messages import LeadStats


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A host.

    Attributes:
        address, interface: by which it reaches the head. note: why it is lost.
        clock_skew_s: its clock less the head's. device_bytes: memory of each accelerator.
        probe_number, reach: the last round of probes it answered; node id -> seconds, -1 for no answer.
    """

    node_id: str
    state: str
    hostname: str
    cpu_cores: int
    memory_bytes: int
    num_devices: int
    is_drained: bool
    silent_s: float
    note: str
    is_leaving: bool = False
    address: str = ""
    interface: str = ""
    versions: dict[str, str] = {}
    clock_skew_s: float = 0.0
    mtu: int = 0
    memory_available_bytes: int = 0
    disk_free_bytes: int = 0
    device_bytes: list[int] = []
    probe_number: int = 0
    reach: dict[str, float] = {}


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica.

    Attributes:
        phase, done, total: how far its start is. state_s: how long the state has lasted.
        note: why it waits. failures: in a row; last_end, log_tail: why the last incarnation ended, and its last lines.
        pids, log_paths: of its ranks, on `nodes`.
        num_open: requests there. stats: the engine's own figures; None before the first.
        role: "prefill" or "decode" where the deployment has such pools.
    """

    replica_id: str
    deployment: str
    state: str
    incarnation: int
    state_s: float
    phase: str
    done: int
    total: int
    note: str
    failures: int
    last_end: str
    is_permanent: bool
    log_tail: str
    nodes: list[str]
    pids: list[int]
    log_paths: list[str]
    num_open: int
    stats: dict[str, float] | None
    role: str = ""


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment. missing_nodes: those that the head waits for before it places anything."""

    nodes: list[NodeStatus]
    replicas: list[ReplicaStatus]
    num_open_requests: int
    is_stopping: bool
    missing_nodes: list[str] = []


def cluster_status(state: ClusterState, table: RequestTable, now: float) -> ClusterStatus:
    """A snapshot; `now` is the clock of both."""
    routes = {route.replica_id: route for route in table.routes()}
    replicas = []
    for replica in sorted(state.replicas.values(), key=lambda r: r.replica_id):
        route = routes.get(replica.replica_id)
        num_open = len(route.attempts) if route else 0
        replicas.append(_replica(replica, num_open, route.stats if route else None, now, _role(state, replica)))
    return ClusterStatus(
        nodes=[node_status(node, now) for _, node in sorted(state.nodes.items())],
        replicas=replicas,
        num_open_requests=table.num_open,
        is_stopping=state.is_stopping,
        missing_nodes=[] if state.roll_call.is_over else state.roll_call.missing(state.nodes_here),
    )


def node_status(node: NodeRecord, now: float) -> NodeStatus:
    """One host at this moment."""
    return NodeStatus(
        node_id=node.node_id,
        state=node.state.value,
        hostname=node.hardware.hostname,
        cpu_cores=node.hardware.cpu_cores,
        memory_bytes=node.hardware.memory_bytes,
        num_devices=len(node.hardware.devices),
        is_drained=node.is_drained,
        silent_s=max(0.0, now - node.seen_s),
        note=node.note,
        is_leaving=node.is_leaving,
        address=node.hardware.address,
        interface=node.hardware.interface,
        versions=node.versions,
        clock_skew_s=node.clock_skew_s,
        mtu=node.hardware.mtu,
        memory_available_bytes=node.hardware.memory_available_bytes,
        disk_free_bytes=node.hardware.disk_free_bytes,
        device_bytes=[device.memory_bytes for device in node.hardware.devices],
        probe_number=node.probe_number,
        reach=node.reach,
    )


def _replica(replica: ReplicaRecord, num_open: int, stats: LeadStats | None, now: float, role: str) -> ReplicaStatus:
    ranks = [rank for _, rank in sorted(replica.ranks.items())]
    progress, failure = replica.progress, replica.failure
    is_starting = replica.state in (ReplicaState.ADOPTING, ReplicaState.STARTING, ReplicaState.LOADING)
    return ReplicaStatus(
        replica_id=replica.replica_id,
        deployment=replica.deployment,
        state=replica.state.value,
        incarnation=replica.incarnation,
        state_s=max(0.0, now - replica.since_s),
        phase=progress.phase if is_starting else "",
        done=progress.done if is_starting else 0,
        total=progress.total if is_starting else 0,
        note=replica.note,
        failures=failure.count,
        last_end=failure.reason,
        is_permanent=failure.is_permanent,
        log_tail=failure.log_tail,
        nodes=[rank.node_id for rank in ranks],
        pids=[rank.pid for rank in ranks],
        log_paths=[rank.log_path for rank in ranks],
        num_open=num_open,
        stats=_figures(stats) if stats is not None else None,
        role=role,
    )


def _figures(stats: LeadStats) -> dict[str, float]:
    return {name: value for name, value in msgspec.structs.asdict(stats).items() if name != "pairs"}


def _role(state: ClusterState, replica: ReplicaRecord) -> str:
    config = state.deployments.get(replica.deployment)
    if config is None or not config.prefill_replicas:
        return ""
    return "prefill" if config.is_prefill(replica.replica_id) else "decode"
