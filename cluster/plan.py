"""What a head would place where, without starting anything: the same placement, on hosts that are there or imagined.

Pure. Weights are counted as equal shares of the model's files; what a start needs beside them is the worker's to say.
Called by `sonar plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import DeploymentConfig, NodesConfig
from cluster.placement import NodeView, Unplaceable, place_replica


@dataclass(frozen=True)
class PlanNode:
    """A host. device_bytes: memory of each accelerator. memory_bytes: 0 = not known."""

    node_id: str
    device_bytes: tuple[int, ...] = ()
    memory_bytes: int = 0
    address: str = ""
    interface: str = ""


@dataclass(frozen=True)
class PlannedRank:
    """One rank. weights_bytes: its share of the weights, -1 when the model is not on this host; limit_bytes: memory of
    its device, or of its host on a CPU, 0 when not known. kv_bytes: as configured; 0: what is left of its share."""

    replica_id: str
    rank: int
    node: PlanNode
    devices: tuple[int, ...]
    weights_bytes: int
    kv_bytes: int
    limit_bytes: int


@dataclass(frozen=True)
class Plan:
    """Everything that was placed, and why something was not or would not fit."""

    ranks: tuple[PlannedRank, ...]
    problems: tuple[str, ...]


def plan_cluster(
    deployments: Sequence[DeploymentConfig],
    nodes: Sequence[PlanNode],
    weights_bytes: Mapping[str, int],
    expected: NodesConfig,
) -> Plan:
    """Places every replica of every deployment, in the file's order.

    Args:
        weights_bytes: deployment -> bytes of its model's files, where they are known.
    """
    by_id = {node.node_id: node for node in nodes}
    views = {n.node_id: NodeView(n.node_id, len(n.device_bytes), tuple(range(len(n.device_bytes))), 0) for n in nodes}
    problems = [f"node {name} is expected and not among the hosts" for name in expected.expected if name not in by_id]
    if len(nodes) < expected.min:
        problems.append(f"{expected.min} nodes are needed (min under [nodes]), there are {len(nodes)}")
    ranks: list[PlannedRank] = []
    for config in deployments:
        parallel, device = config.engine_config.parallel, config.engine_config.device
        for index in range(config.num_replicas):
            replica_id = f"{config.name}-{index}"
            need = (parallel.world_size, parallel.tp_size, device)
            placed = place_replica(*need, list(views.values()), {}, config.ranks_per_host)
            if isinstance(placed, Unplaceable):
                problems.append(f"{replica_id} has no place: {placed.text}")
                break
            for place in placed:
                views[place.node_id] = _without(views[place.node_id], place.devices)
                node = by_id[place.node_id]
                ranks.append(
                    PlannedRank(
                        replica_id,
                        place.rank,
                        node,
                        place.devices,
                        weights_bytes.get(config.name, -parallel.world_size) // parallel.world_size,
                        config.engine_config.cache.memory_bytes,
                        node.device_bytes[place.devices[0]] if place.devices else node.memory_bytes,
                    )
                )
    return Plan(tuple(ranks), (*problems, *_too_large(ranks)))


def _without(view: NodeView, devices: tuple[int, ...]) -> NodeView:
    """A host after one more rank took these devices."""
    free = tuple(index for index in view.free_devices if index not in devices)
    return NodeView(view.node_id, view.num_devices, free, view.num_workers + 1)


def _too_large(ranks: Sequence[PlannedRank]) -> list[str]:
    """Where known weights and KV cache are more than there is; ranks on a CPU host share its memory."""
    problems = []
    hosts: dict[str, list[PlannedRank]] = {}
    for rank in ranks:
        if not rank.devices:
            hosts.setdefault(rank.node.node_id, []).append(rank)
        elif 0 < rank.limit_bytes < _need(rank):
            where = f"device {rank.devices[0]} of {rank.node.node_id}"
            problems.append(_text(f"{rank.replica_id} rank {rank.rank}", _need(rank), where, rank.limit_bytes))
    for node_id, on_host in hosts.items():
        need, limit = sum(map(_need, on_host)), on_host[0].limit_bytes
        if 0 < limit < need:
            problems.append(_text(f"{len(on_host)} ranks", need, node_id, limit))
    return problems


def _need(rank: PlannedRank) -> int:
    return max(0, rank.weights_bytes) + rank.kv_bytes


def _text(what: str, need: int, where: str, limit: int) -> str:
    return (
        f"{what} would need {need / 2**30:.1f} GiB for weights and KV cache, {where} has {limit / 2**30:.1f} GiB; "
        "raise tp or pp, lower memory_bytes under [deployment.cache], or give fewer replicas"
    )
