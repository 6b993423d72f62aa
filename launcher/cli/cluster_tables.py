"""A cluster's status as text: a table of nodes, one of replicas, and what waits. Pure; called by `sonar status`."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.status import ClusterStatus, NodeStatus, ReplicaStatus

GIB = 2**30
NOTE_WIDTH = 80


def cluster_lines(status: ClusterStatus) -> list[str]:
    """The tables, line by line."""
    nodes = [("NODE", "STATE", "ADDRESS", "CPUS", "MEMORY", "DEVICES", "SEEN", "NOTE"), *map(_node, status.nodes)]
    replicas = [
        ("REPLICA", "STATE", "FOR", "NODES", "START", "OPEN", "RUNS", "BLOCKS", "NOTE"),
        *map(_replica, status.replicas),
    ]
    lines = [*columns(nodes), "", *columns(replicas)]
    if status.missing_nodes:
        lines += ["", f"waits for nodes: {', '.join(status.missing_nodes)}"]
    last = f"{status.num_open_requests} open requests" + (", the head is stopping" if status.is_stopping else "")
    return [*lines, "", last]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as left-aligned text columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def duration(seconds: float) -> str:
    """ "42 s", "5 min", "3 h 20 min" or "2 d 4 h"."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if days < 1 else f"{days} d {hours % 24} h"


def _node(node: NodeStatus) -> tuple[str, ...]:
    state = "leaving" if node.is_leaving else "drained" if node.is_drained else node.state
    return (
        node.node_id,
        state if node.state == "up" else node.state,
        f"{node.address} {node.interface}".strip(),
        str(node.cpu_cores),
        f"{node.memory_bytes / GIB:.0f} GiB",
        str(node.num_devices),
        f"{node.silent_s:.1f} s",
        node.note[:NOTE_WIDTH],
    )


def _replica(replica: ReplicaStatus) -> tuple[str, ...]:
    stats = replica.stats or {}
    start = f"{replica.phase} {replica.done}/{replica.total}" if replica.phase else str(replica.incarnation)
    blocks = f"{stats['blocks_in_use']:.0f}/{stats['blocks_total']:.0f}" if stats else ""
    is_bad = replica.state in ("backoff", "failed")
    note = replica.note or (replica.last_end if is_bad else replica.role)
    return (
        replica.replica_id,
        replica.state,
        duration(replica.state_s),
        ",".join(dict.fromkeys(replica.nodes)),
        start,
        str(replica.num_open),
        f"{stats['num_running']:.0f}" if stats else "",
        blocks,
        note.partition("\n")[0][:NOTE_WIDTH],
    )
