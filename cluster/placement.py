"""Where the ranks of a replica go: a pure function of what the nodes have free.

A tensor-parallel group stays inside one host when one has room for it (its all-reduces are the traffic that cannot
wait); the groups of a replica prefer a host that it is on already; replicas spread out. Accelerators are exclusive; a
CPU host takes any number of ranks, the least loaded host first, unless the deployment limits a replica's ranks on a
host: that is how one is spread over CPU hosts. Does not know memory needs: the worker's start says so.
Called by `cluster.state` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sonar.config import Device

NODES_NAMED = 16


@dataclass(frozen=True)
class NodeView:
    """A node that takes work. free_devices: indices of accelerators that no worker holds."""

    node_id: str
    num_devices: int
    free_devices: tuple[int, ...]
    num_workers: int


class RankPlacement(NamedTuple):
    """One rank's host and accelerators (none on a CPU)."""

    rank: int
    node_id: str
    devices: tuple[int, ...]


class Unplaceable(NamedTuple):
    """Why there is no place now. free: what there is where, which changes more often than the reason."""

    reason: str
    free: str = ""

    @property
    def text(self) -> str:
        """All of it, for the status."""
        return f"{self.reason}; free of all: {self.free}" if self.free else self.reason


class _Room:
    """What is left while a replica's groups are placed one after the other."""

    def __init__(
        self, nodes: Sequence[NodeView], use_devices: bool, failures: Mapping[str, int], ranks_per_host: int
    ) -> None:
        self.use_devices = use_devices
        if use_devices:
            nodes = [node for node in nodes if node.free_devices]
        self.workers = {node.node_id: node.num_workers for node in nodes}
        self.free = {node.node_id: list(node.free_devices) for node in nodes}
        self.failures = failures
        self.taken: dict[str, int] = {}
        self._limit = ranks_per_host or math.inf

    def _num_open(self, node_id: str) -> float:
        """Ranks that still fit on that host."""
        left = self._limit - self.taken.get(node_id, 0)
        return min(left, len(self.free[node_id])) if self.use_devices else left

    def best(self, num_ranks: int) -> str | None:
        """The host to give so many ranks to; None when none has room for them."""
        fitting = [n for n in self.free if self._num_open(n) >= num_ranks]
        return min(fitting, key=self._order, default=None)

    def roomiest(self) -> str | None:
        """The host with most room, for a group that fits in none; None when all are full."""
        order = sorted(self.free, key=self._order)  # of equals the one that any rank would be given to
        node_id = max(order, key=lambda n: (self._num_open(n), n in self.taken), default=None)
        return node_id if node_id is not None and self._num_open(node_id) >= 1 else None

    def _order(self, node_id: str) -> tuple[int, bool, int, int, str]:
        spare = len(self.free[node_id]) if self.use_devices else 0
        return (self.failures.get(node_id, 0), node_id not in self.taken, self.workers[node_id], spare, node_id)

    def take(self, node_id: str) -> tuple[int, ...]:
        """Devices of one more rank on that host."""
        self.taken[node_id] = self.taken.get(node_id, 0) + 1
        self.workers[node_id] += 1
        return (self.free[node_id].pop(0),) if self.use_devices else ()


def place_replica(
    world_size: int,
    tp_size: int,
    device: Device,
    nodes: Sequence[NodeView],
    failures: Mapping[str, int],
    ranks_per_host: int = 0,
) -> list[RankPlacement] | Unplaceable:
    """Places all ranks or none.

    Args:
        world_size: ranks, a multiple of tp_size; ranks k*tp_size .. (k+1)*tp_size-1 are one tensor-parallel group.
        device: auto means accelerators if any node has one.
        nodes: those that take work now.
        failures: node id -> how often this replica failed there lately; such hosts come last.
        ranks_per_host: of this replica, at most; 0 = no limit.
    """
    if not nodes:
        return Unplaceable("no node is up; start an agent on a host and join it")
    use_devices = device == "cuda" or (device == "auto" and any(node.num_devices for node in nodes))
    room = _Room(nodes, use_devices, failures, ranks_per_host)
    placed: list[RankPlacement] = []
    for first in range(0, world_size, tp_size):
        whole = room.best(tp_size)
        for rank in range(first, first + tp_size):
            node_id = whole or room.roomiest()
            if node_id is None:
                if ranks_per_host and ranks_per_host * len(nodes) < world_size:
                    limit = f"ranks_per_host = {ranks_per_host} and {len(nodes)} hosts up"
                    return Unplaceable(f"{world_size} ranks need more hosts, with {limit}; join more or raise it")
                reason = shortfall(world_size, device, nodes)
                return Unplaceable(reason or f"needs {world_size} CUDA devices, more than are free", _free_text(nodes))
            placed.append(RankPlacement(rank, node_id, room.take(node_id)))
    return placed


def shortfall(world_size: int, device: Device, nodes: Sequence[NodeView]) -> str:
    """Why these nodes could not hold the replica even if nothing ran there; empty when they could."""
    total = sum(node.num_devices for node in nodes)
    if device == "cpu" or (device == "auto" and not total) or total >= world_size:
        return ""
    if not total:
        return f"no CUDA device on {'this host' if len(nodes) == 1 else 'any host'}; use --device cpu"
    return f"needs {world_size} CUDA devices and there are {total} in all; lower --tp or --pp, or use --device cpu"


def _free_text(nodes: Sequence[NodeView]) -> str:
    """What is free where; of many nodes the first ones and a sum."""
    named = ", ".join(f"{node.node_id} {len(node.free_devices)}/{node.num_devices}" for node in nodes[:NODES_NAMED])
    rest = nodes[NODES_NAMED:]
    if not rest:
        return named
    free, total = sum(len(node.free_devices) for node in rest), sum(node.num_devices for node in rest)
    return f"{named} and {free}/{total} on {len(rest)} more"
