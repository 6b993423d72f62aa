"""`sonar status`: this user's running servers, each with its readiness, model, up-time and processes; of a cluster's
head also its nodes and replicas. With `--head` those of any cluster whose token is at hand.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence

import httpx
import msgspec
import psutil

from launcher.cli.cluster_tables import cluster_lines, columns, duration
from launcher.cli.state import ServerRecord, StateDir
from launcher.operator import HeadContact, add_head_flags
from sonar.errors import SonarError

NOTHING_RUNS = 3  # the exit code that init scripts use for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server or cluster, and how often."""
    parser.add_argument("--port", type=int, default=None, help="only the server on this port")
    parser.add_argument("--watch", type=float, default=0.0, metavar="S", help="show it again each S seconds")
    parser.add_argument("--json", action="store_true", help="of a cluster: everything, for programs")
    add_head_flags(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints once, or until interrupted. Returns 3 when no server runs here.

    Raises:
        SonarError: a head was named, and does not answer.
    """
    if args.head or args.json:
        with HeadContact.find(args, environ) as head:
            return _repeat(args.watch, lambda: _show_head(head, is_json=args.json))
    return _repeat(args.watch, lambda: _show_servers(args, environ))


def _repeat(interval_s: float, show: Callable[[], int]) -> int:
    code = show()
    while interval_s > 0:
        time.sleep(interval_s)
        print("\x1b[2J\x1b[H", end="")
        code = show()
    return code


def _show_head(head: HeadContact, *, is_json: bool) -> int:
    status = head.status()
    print(msgspec.json.encode(status).decode() if is_json else "\n".join(cluster_lines(status)), flush=True)
    return 0


def _show_servers(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    records = [r for r in StateDir.of_user(environ).records() if args.port in (None, r.port)]
    if not records:
        print("no server runs" + ("" if args.port is None else f" on port {args.port}"))
        return NOTHING_RUNS
    rows = [("PORT", "STATE", "MODEL", "UP", "URL", "PID")]
    rows += [
        (str(r.port), readiness(r), r.model, duration(time.time() - r.started_unix_s), r.url, str(r.pid))
        for r in records
    ]
    for line in columns(rows):
        print(line)
    for record in records:
        for line in [*process_lines(record), *_cluster_of(record)]:
            print(line)
    return 0


def _cluster_of(record: ServerRecord) -> list[str]:
    """The tables of a head's cluster; one line when it does not answer."""
    if not record.control:
        return []
    try:
        with HeadContact.of_record(record) as head:
            return ["", *cluster_lines(head.status())]
    except SonarError as error:
        return [f"  cluster: {error}"]


def readiness(record: ServerRecord, timeout_s: float = 8.0) -> str:
    """What `/ready` says: "ready", "starting" (it listens, no token yet) or "no answer"."""
    try:
        # Unverified: the certificate names the host that clients know, and this is the process of our own record.
        answer = httpx.get(f"{record.url}/ready", timeout=timeout_s, verify=not record.is_https)
    except httpx.HTTPError:
        return "no answer"
    return "ready" if answer.status_code == 200 else "starting"


def process_lines(record: ServerRecord) -> list[str]:
    """The server's process tree with what each holds of memory; empty when it has just ended."""
    try:
        parent = psutil.Process(record.pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    lines = []
    for process in processes:
        try:
            mib = process.memory_info().rss / 2**20
            role = "head" if process.pid == record.pid else role_of(process.cmdline())
            lines.append(f"  port {record.port}: {role} pid {process.pid} {mib:.0f} MiB")
        except psutil.NoSuchProcess:
            continue
    return lines


def role_of(command: Sequence[str]) -> str:
    """What a process below a head is, from its command line."""
    text = " ".join(command)
    for mark, role in (("launcher.agent", "agent"), ("resource_tracker", "helper"), ("spawn_main", "worker")):
        if mark in text:
            return role
    return "other"
