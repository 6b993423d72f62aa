"""`sonar status`: this user's running servers, each with its readiness, model, up-time and processes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

import httpx
import psutil

from launcher.cli.state import ServerRecord, StateDir

NOTHING_RUNS = 3  # the exit code that init scripts use for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server."""
    parser.add_argument("--port", type=int, default=None, help="only the server on this port")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints a row a server and a line a process. Returns 3 when none runs."""
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
        for line in process_lines(record):
            print(line)
    return 0


def readiness(record: ServerRecord, timeout_s: float = 8.0) -> str:
    """What `/ready` says: "ready", "starting" (it listens, no token yet) or "no answer"."""
    try:
        # Unverified: the certificate names the host that clients know, and this is the process of our own record.
        answer = httpx.get(f"{record.url}/ready", timeout=timeout_s, verify=not record.is_https)
    except httpx.HTTPError:
        return "no answer"
    return "ready" if answer.status_code == 200 else "starting"


def duration(seconds: float) -> str:
    """ "42 s", "5 min", "3 h 20 min" or "2 d 4 h"."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if days < 1 else f"{days} d {hours % 24} h"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as left-aligned text columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


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
