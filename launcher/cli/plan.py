"""`sonar plan cluster.toml`: where every rank would run, and what would not fit; starts nothing.

Hosts are those given with `--node`, else those of a running head, else this one alone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from cluster.cluster_file import AUTO, HeadSettings, read_cluster_file
from cluster.config import DeploymentConfig, NetworkConfig
from cluster.plan import Plan, PlannedRank, PlanNode, plan_cluster
from cluster.status import ClusterStatus
from launcher.cli.cluster_tables import columns
from launcher.cli.state import StateDir
from launcher.hardware import inspect_hardware
from launcher.network import outward_address
from launcher.operator import HeadContact, add_head_flags
from sonar.errors import UserError
from sonar.transport import Address

_NODE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:=(\d+)x(\d+)(?:GiB)?)?(?:,(\d+)(?:GiB)?)?")
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and the hosts."""
    parser.add_argument("config", type=Path, metavar="FILE", help="cluster.toml")
    parser.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="NAME[=DEVICESxGiB][,GiB]",
        help="an imagined host, e.g. gpu-1=8x80 (8 devices of 80 GiB) or cpu-1,64 (64 GiB of memory); repeatable",
    )
    add_head_flags(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the plan. Returns 1 when something has no place or does not fit.

    Raises:
        UserError: the file or a `--node` is wrong.
    """
    state = StateDir.of_user(environ)
    settings = read_cluster_file(args.config, state.server_dir)
    nodes = [parse_node(text) for text in args.node] or _real_nodes(args, environ, state, settings)
    config = settings.config
    sizes = {d.name: size for d in config.deployments if (size := weights_bytes(d)) is not None}
    plan = plan_cluster(config.deployments, nodes, sizes, config.nodes)
    for line in [*_port_lines(config.network), *_rank_port_lines(plan), "", *plan_lines(plan)]:
        print(line)
    return 1 if plan.problems else 0


def parse_node(text: str) -> PlanNode:
    """A host as `--node` gives it.

    Raises:
        UserError: the text has another form.
    """
    match = _NODE.fullmatch(text)
    if match is None:
        raise UserError(f"--node {text!r}: write NAME, NAME=DEVICESxGiB or NAME,GiB, e.g. gpu-1=8x80", param="node")
    name, devices, device_gib, memory_gib = match.groups()
    return PlanNode(name, (int(device_gib or 0) * GIB,) * int(devices or 0), int(memory_gib or 0) * GIB)


def weights_bytes(deployment: DeploymentConfig) -> int | None:
    """Size of a model's weight files; None unless they are a path of this host."""
    path = Path(deployment.engine_config.model)
    if path.is_file():
        return path.stat().st_size
    files = [file for file in path.glob("*") if file.suffix in (".safetensors", ".gguf")] if path.is_dir() else []
    return sum(file.stat().st_size for file in files) or None


def _real_nodes(
    args: argparse.Namespace, environ: Mapping[str, str], state: StateDir, settings: HeadSettings
) -> list[PlanNode]:
    if args.head or any(record.control for record in state.records()):
        with HeadContact.find(args, environ) as head:
            return nodes_of(head.status())
    if not settings.head_runs_workers:
        raise UserError("no head runs and head_runs_workers is false: give the hosts with --node", param="node")
    facts = inspect_hardware()
    return [PlanNode("local", tuple(d.memory_bytes for d in facts.devices), facts.memory_bytes)]


def nodes_of(status: ClusterStatus) -> list[PlanNode]:
    """The hosts of a cluster that take work."""
    return [
        PlanNode(n.node_id, tuple(n.device_bytes), n.memory_bytes, n.address, n.interface)
        for n in status.nodes
        if n.state == "up" and not n.is_drained and not n.is_leaving
    ]


def _port_lines(network: NetworkConfig) -> list[str]:
    host, by = network.control_host, ""
    if host == AUTO:
        route = outward_address()
        host, by = route.address, f" on {route.interface}"
    scheme = "HTTPS" if network.tls else "HTTP"
    return [
        f"{Address(host, network.control_port)}{by}  agents, leads, operators; open it between the hosts",
        f"{Address(network.http_host, network.http_port)}  {scheme}, for clients",
    ]


def _rank_port_lines(plan: Plan) -> list[str]:
    """Collectives listen on ports that the kernel chooses: between the hosts of one replica all have to be open."""
    hosts: dict[str, list[str]] = {}
    for rank in plan.ranks:
        hosts.setdefault(rank.replica_id, []).append(rank.node.node_id)
    spanning = sorted({", ".join(dict.fromkeys(names)) for names in hosts.values() if len(set(names)) > 1})
    return [f"every TCP port between {names}: they share a replica" for names in spanning]


def plan_lines(plan: Plan) -> list[str]:
    """The plan as a table, then what is wrong with it."""
    header = ("REPLICA", "RANK", "NODE", "DEVICES", "INTERFACE", "WEIGHTS", "KV CACHE", "OF")
    rows = [header, *map(_row, plan.ranks)]
    return [*columns(rows), *(f"error: {problem}" for problem in plan.problems)]


def _row(rank: PlannedRank) -> tuple[str, ...]:
    return (
        rank.replica_id,
        str(rank.rank),
        rank.node.node_id,
        ",".join(map(str, rank.devices)) or "cpu",
        f"{rank.node.interface} {rank.node.address}".strip() or "?",
        "?" if rank.weights_bytes < 0 else _gib(rank.weights_bytes),
        _gib(rank.kv_bytes) if rank.kv_bytes else "what is left",
        _gib(rank.limit_bytes) if rank.limit_bytes else "?",
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
