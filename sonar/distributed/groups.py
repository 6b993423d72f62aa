"""The process groups of one rank: made for an incarnation, torn down with it.

A DeviceMesh of axes pp, dp, tp over gloo (CPU) or NCCL and RCCL (GPU; gloo beside it for what is on the host). Which
interface they use is computed from the hosts involved. Knows nothing of models. Called by the worker's loader.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sonar.config import ParallelConfig
from sonar.distributed.pipeline import PipelineLinks
from sonar.distributed.tensor_parallel import TensorParallelGroup
from sonar.errors import RemoteError
from sonar.transport import Address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = (Path("/proc/self/ns/net"), Path("/proc/self/ns/pid"))
# A collective waits for the slowest rank's loading. A rank that ends is noticed by its agent, one that hangs by the
# head, both of which end the process: this is not how faults are found.
_COLLECTIVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Placement:
    """Where the ranks run. host_of: by rank, a name that is equal for ranks of one host."""

    host_of: tuple[str, ...]

    @property
    def is_one_host(self) -> bool:
        """Whether shared memory reaches every rank."""
        return len(set(self.host_of)) == 1

    def num_beside(self, rank: int) -> int:
        """Ranks on the host of this one, itself included."""
        return self.host_of.count(self.host_of[rank])


class RankGroups:
    """Owns the process groups, of which a process has one set at a time.

    Args:
        store: rendezvous keys, for this incarnation alone. head: an address that every host reaches.

    Attributes:
        own_host: address at which other ranks reach this host.
        tensor: None when tp_size is 1. pipeline: None when pp_size is 1. experts: the ranks of this stage, over all
            data-parallel groups; None when ep_size is 1.

    Raises:
        RemoteError: a rank did not come.
    """

    def __init__(self, store: Store, parallel: ParallelConfig, device: torch.device, head: Address) -> None:
        self.parallel = parallel
        self.placement = _exchange_placement(store, parallel)
        # torch reads the choice of interface from the environment alone.
        self.own_host, interface = find_interface(head, self.placement)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.putenv(name, interface)
        is_gpu = device.type == "cuda"
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
                store=store,
                rank=parallel.rank,
                world_size=parallel.world_size,
                timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
            )
        except RuntimeError as error:
            raise RemoteError(f"the ranks did not meet over {interface}: {error}", rank=parallel.rank) from error
        shape = (parallel.pp_size, parallel.num_groups, parallel.tp_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
        self.tensor = self._make_tensor(mesh, is_gpu) if parallel.tp_size > 1 else None
        self.pipeline = PipelineLinks(mesh.get_group("pp"), parallel) if parallel.pp_size > 1 else None
        self.experts = _make_stage_group(parallel) if parallel.ep_size > 1 else None

    @staticmethod
    def _make_tensor(mesh: DeviceMesh, is_gpu: bool) -> TensorParallelGroup:
        return TensorParallelGroup(mesh.get_group("tp"), has_ring_sum=is_gpu)

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's numbers (as many on each), in the order of the ranks, on every rank."""
        own = torch.tensor(numbers, dtype=torch.int64)
        parts = [torch.empty_like(own) for _ in range(self.parallel.world_size)]
        dist.all_gather(parts, own)
        return [part.tolist() for part in parts]

    def barrier(self) -> None:
        """Waits for every rank."""
        self.gather_numbers([self.parallel.rank])

    def close(self) -> None:
        """Ends the groups; nothing of theirs may be under way."""
        dist.destroy_process_group()


def _make_stage_group(parallel: ParallelConfig) -> dist.ProcessGroup:
    """The ranks of this one's stage, in order. Every rank takes part in making every group; it keeps its own."""
    size = parallel.stage_size
    made = [dist.new_group(list(range(first, first + size))) for first in range(0, parallel.world_size, size)]
    own = made[parallel.pp_rank]
    assert isinstance(own, dist.ProcessGroup)
    return own


def _exchange_placement(store: Store, parallel: ParallelConfig) -> Placement:
    """Each rank says which host it is on, and hears it of the others."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    # Containers of one machine have its boot id, but neither its loopback nor its process ids.
    spaces = [str(path.readlink()) for path in _NAMESPACES if path.is_symlink()]
    store.set(f"host/{parallel.rank}", json.dumps([boot_id, socket.gethostname(), *spaces]))
    return Placement(tuple(store.get(f"host/{rank}").decode() for rank in range(parallel.world_size)))


class Route(NamedTuple):
    """An address of this host, and the network interface that has it."""

    address: str
    interface: str


def find_interface(head: Address, placement: Placement) -> Route:
    """What the other ranks reach this one by: loopback on one host, else what leads towards the head.

    Raises:
        RemoteError: no interface has the address by which the head is reached.
    """
    addresses = {
        address.address.partition("%")[0]: name for name, found in psutil.net_if_addrs().items() for address in found
    }
    if placement.is_one_host and "127.0.0.1" in addresses:
        return Route("127.0.0.1", addresses["127.0.0.1"])
    family = socket.AF_INET6 if head.needs_ipv6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((head.host, head.port))  # no packet is sent: the kernel chooses the route
        own = probe.getsockname()[0].partition("%")[0]
    if own not in addresses:
        raise RemoteError(f"no interface has {own}, the address towards the head {head}")
    return Route(own, addresses[own])
