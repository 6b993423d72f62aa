"""`sonar stop`: ends a server of this user and says what happened to every process of it.

Asks first (SIGTERM: open requests are finished within the server's drain time), kills what is left after the grace
period. A process is signalled only if its start time is the recorded one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

import psutil

from launcher.cli.state import ServerRecord, StateDir
from launcher.cli.status import NOTHING_RUNS
from sonar.errors import UserError

KILL_WAIT_S = 5.0
POLL_S = 0.05
SECOND_SIGNAL_S = 0.1  # two equal signals that are both pending count as one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server and how patiently."""
    parser.add_argument("--port", type=int, default=None, help="of the server (default: the only one that runs)")
    parser.add_argument("--all", action="store_true", help="every server of this user")
    parser.add_argument("--now", action="store_true", help="do not wait for open requests")
    parser.add_argument("--grace", type=float, default=60.0, help="s until what is left is killed (default: 60)")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Stops the chosen servers. Returns 3 when there is none, 1 when a process could not be ended."""
    state = StateDir.of_user(environ)
    records = [r for r in state.records() if args.port in (None, r.port)]
    if not records:
        print("no server runs" + ("" if args.port is None else f" on port {args.port}"))
        return NOTHING_RUNS
    if len(records) > 1 and not args.all:
        ports = ", ".join(str(r.port) for r in records)
        raise UserError(f"servers run on ports {ports}; name one with --port, or give --all", param="port")
    return max(_stop_and_report(state, record, args.grace, now=args.now) for record in records)


def _stop_and_report(state: StateDir, record: ServerRecord, grace_s: float, *, now: bool) -> int:
    begin_s = time.monotonic()
    killed, left = end_tree(record, grace_s, now=now)
    took = f"{time.monotonic() - begin_s:.1f} s"
    if left:
        print(f"port {record.port}: processes {left} could not be ended in {took}")
        return 1
    state.remove(record.port, record.pid)
    how = f"stopped, {len(killed)} processes killed after the grace period: {killed}" if killed else "stopped"
    print(f"port {record.port}: {how} ({took})")
    return 0


def end_tree(record: ServerRecord, grace_s: float, *, now: bool = False) -> tuple[list[int], list[int]]:
    """Ends the server and every process below it. Returns the pids that had to be killed and those that still run.

    now: asks twice, which a head takes as "without draining".
    """
    if not record.is_running():
        return [], []
    parent = psutil.Process(record.pid)
    try:
        # Children first: once the parent is gone nobody can tell whose they were. psutil keeps their start times.
        tree = [*parent.children(recursive=True), parent]
        parent.terminate()
        if now:
            time.sleep(SECOND_SIGNAL_S)
            parent.terminate()
    except psutil.NoSuchProcess:
        return [], []
    slow = _wait_for_end(tree, grace_s)
    for process in slow:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    left = _wait_for_end(slow, KILL_WAIT_S)
    return [process.pid for process in slow], [process.pid for process in left]


def _wait_for_end(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after the time. A zombie has ended: its parent may never ask for it."""
    deadline_s = time.monotonic() + timeout_s
    while left := [process for process in processes if _runs(process)]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
