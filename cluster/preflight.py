"""What is wrong with the hosts of a cluster, from what their agents said: each finding names host, value and remedy.

Pure functions of a status. The head logs what concerns a host when it joins; `sonar check` shows everything, after a
round of probes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.status import ClusterStatus, NodeStatus
from cluster.versions import NCCL

MAX_SKEW_S = 2.0
MIN_DISK_BYTES = 1 << 30
MIN_MEMORY_BYTES = 512 << 20
SLOW_PEER_S = 0.05
# A stream that moves to another host goes on with the same tokens only if the same code computes it there.
COMPARED = ("torch", "transformers", "python", "nixl-cu13", "nixl-cu12", *NCCL)


@dataclass(frozen=True)
class Finding:
    """Something to mend. is_fatal: the cluster cannot work as it is."""

    node_id: str
    problem: str
    remedy: str
    is_fatal: bool = False

    def __str__(self) -> str:
        return f"{self.node_id}: {self.problem}; {self.remedy}"


def cluster_findings(status: ClusterStatus, head_versions: Mapping[str, str]) -> list[Finding]:
    """Everything that is odd, by host."""
    up = [node for node in status.nodes if node.state == "up"]
    found = [
        Finding(name, "has not joined", "look at the output of `sonar join` there", is_fatal=True)
        for name in status.missing_nodes
    ]
    for node in status.nodes:
        if node.state != "up":
            found.append(Finding(node.node_id, f"is lost ({node.note})", "start `sonar join` there again"))
    reference = _reference_versions(up, head_versions)
    for node in up:
        found += _host_findings(node)
        found += _version_findings(node, reference)
    return [*found, *_network_findings(up)]


def joining_findings(node: NodeStatus, head_versions: Mapping[str, str]) -> list[Finding]:
    """What is odd about one host alone, said before anything is placed on it."""
    return [*_host_findings(node), *_version_findings(node, _reference_versions([node], head_versions))]


def probe_findings(status: ClusterStatus, number: int) -> list[Finding]:
    """Which hosts do not reach which, after a round of probes."""
    found = []
    addresses = {node.node_id: f"{node.address}" for node in status.nodes}
    for node in status.nodes:
        if node.state != "up":
            continue
        if node.probe_number != number:
            found.append(Finding(node.node_id, "did not answer the probe in time", "look at its agent's log", True))
            continue
        for peer, seconds in sorted(node.reach.items()):
            where = f"{peer} at {addresses.get(peer, '?')}"
            if seconds < 0:
                remedy = "open TCP between the two hosts, or give the right --address to `sonar join`"
                found.append(Finding(node.node_id, f"cannot reach {where}", remedy, is_fatal=True))
            elif seconds > SLOW_PEER_S:
                text = f"needs {seconds * 1000:.0f} ms to {where}"
                found.append(Finding(node.node_id, text, "keep ranks of one replica on nearer hosts"))
    return found


def _reference_versions(nodes: list[NodeStatus], head: Mapping[str, str]) -> dict[str, str]:
    """What most hosts have, the head's where it has the package; a head alone may lack torch."""
    reference = {}
    for package in COMPARED:
        versions = sorted(node.versions.get(package, "") for node in nodes)
        common = max(versions, key=versions.count, default="")
        reference[package] = head.get(package, "") or common
    return reference


def _version_findings(node: NodeStatus, reference: Mapping[str, str]) -> list[Finding]:
    found = []
    for package, wanted in reference.items():
        has = node.versions.get(package, "")
        if has != wanted:
            text = f"{package} is {has or 'not installed'} there, {wanted or 'not installed'} on the head or most hosts"
            found.append(Finding(node.node_id, text, "install the same version on all"))
    return found


def _host_findings(node: NodeStatus) -> list[Finding]:
    found = []
    if abs(node.clock_skew_s) > MAX_SKEW_S:
        side = "ahead of" if node.clock_skew_s > 0 else "behind"
        text = f"its clock is {abs(node.clock_skew_s):.1f} s {side} the head's"
        found.append(Finding(node.node_id, text, "run a time service (chrony, systemd-timesyncd) on both"))
    if 0 < node.disk_free_bytes < MIN_DISK_BYTES:
        text = f"{node.disk_free_bytes >> 20} MiB are free on the disk of its state directory"
        found.append(Finding(node.node_id, text, "free some, or choose another --state-dir"))
    if 0 < node.memory_available_bytes < MIN_MEMORY_BYTES:
        text = f"{node.memory_available_bytes >> 20} MiB of memory were free when it joined"
        found.append(Finding(node.node_id, text, "end what else runs there"))
    return found


def _network_findings(nodes: list[NodeStatus]) -> list[Finding]:
    """Between hosts: addresses that others cannot use, and packets that do not fit."""
    found = []
    addressed = [node for node in nodes if node.address]
    is_many = len({node.address for node in addressed}) > 1
    largest = max((node.mtu for node in addressed if not _is_loopback(node)), default=0)
    for node in addressed:
        if _is_loopback(node) and is_many:
            text = f"its address is {node.address}, which other hosts cannot reach"
            remedy = "join it by the head's real address, or give --address"
            found.append(Finding(node.node_id, text, remedy, is_fatal=True))
        elif 0 < node.mtu < largest:
            text = f"the MTU of {node.interface} is {node.mtu}, elsewhere {largest}"
            found.append(Finding(node.node_id, text, "set the same on all hosts, or large transfers may stall"))
    return found


def _is_loopback(node: NodeStatus) -> bool:
    return node.address.startswith("127.") or node.address == "::1"
