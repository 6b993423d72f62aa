"""Facts about, and ends of, processes on this host (Linux): parent death, identity beyond a pid, whole-session kills.

Knows nothing of clusters. Called by the agent's supervisor, by workers at their start, and by the head for its own
local agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from sonar.errors import SonarError

# A worker's exit code when its settings or model are the user's fault: the same start would fail again (EX_CONFIG).
EXIT_USER_ERROR = 78
_PR_SET_PDEATHSIG = 1


class ProcessInfo(NamedTuple):
    """From /proc/PID/stat (proc(5)): start is in clock ticks since boot, so (pid, start) names one process for good."""

    pid: int
    state: str
    parent: int
    session: int
    start: int


def read_process(pid: int) -> ProcessInfo | None:
    """None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command name, in brackets, may hold anything
    return ProcessInfo(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def is_running(pid: int, start: int) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    info = read_process(pid)
    return info is not None and info.start == start and info.state not in "ZX"


def session_members(session: int) -> list[ProcessInfo]:
    """Processes of a session that are not zombies; empty when it has ended."""
    found = (read_process(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [info for info in found if info is not None and info.session == session and info.state not in "ZX"]


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel SIGKILL this process when its parent ends, however it ends.

    The signal follows the *thread* that made this process, so a parent must start children from a thread that lives as
    long as itself. A process may have been orphaned before the call: then it ends at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise SonarError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def signal_group(group: int, number: int) -> None:
    """Sends a signal to every process of a group; none left is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def kill_session(session: int, timeout_s: float = 5.0) -> list[int]:
    """SIGKILLs every process of a session, also those that made groups of their own, and waits for their end.

    Returns the pids killed. Raises `SonarError` when one does not end in time (stuck in the kernel).
    """
    killed: list[int] = []
    deadline_s = time.monotonic() + timeout_s
    while members := session_members(session):
        if time.monotonic() > deadline_s:
            raise SonarError(f"processes {[m.pid for m in members]} survive SIGKILL for {timeout_s} s")
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
            killed.append(member.pid)
        time.sleep(0.01)
    return sorted(set(killed))


def describe_exit(exit_code: int) -> str:
    """ "exit code 3" or "signal SIGKILL", from a return code as `subprocess` and `multiprocessing` give it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"
