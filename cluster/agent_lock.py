"""The lock of an agent's folder: one agent a folder, and whose it is can be read by a head that comes later.

Called by the agent (takes it) and by the head's `cluster.local_agent` (reads it).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import NamedTuple, TextIO

from sonar.process import is_running, read_process

_NAME = "agent.lock"


class LockHolder(NamedTuple):
    """The agent that holds a folder. head: address that it was started with."""

    pid: int
    head: str


def lock_agent(state_dir: Path, head: str) -> TextIO | None:
    """Takes the lock for this process, until the file is closed; None when another one holds it."""
    lock = (state_dir / _NAME).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    info = read_process(os.getpid())
    assert info is not None, "no /proc: only Linux is supported"
    lock.truncate(0)
    lock.write(f"{info.pid} {info.start} {head}")
    lock.flush()
    return lock


def lock_holder(state_dir: Path) -> LockHolder | None:
    """The agent that holds the folder now; None when none does."""
    with contextlib.suppress(OSError, ValueError):
        pid, start, head = (state_dir / _NAME).read_text().split(" ")
        if is_running(int(pid), int(start)):
            return LockHolder(int(pid), head)
    return None
