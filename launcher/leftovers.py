"""What a crashed agent may have left running, and its end.

A worker dies with its agent by the kernel's hand, but what a worker itself has started does not. The live workers are
therefore on disk, by pid and start time (a pid alone is used again), and the next agent of that state directory kills
the rest of their sessions. Called by `launcher.supervisor`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sonar.process import kill_session, read_process, session_members

logger = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True):
    """A worker that led a session. boot_id: pids and start times begin anew with each boot."""

    pid: int
    start: int
    boot_id: str


def boot_id() -> str:
    """Names this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Leftovers:
    """Owns the file of live workers.

    Args:
        mark: "NAME=value" in the environment of every process that descends from an agent of this state directory.
    """

    def __init__(self, path: Path, mark: str) -> None:
        self.mark = mark
        self._path = path
        self._boot_id = boot_id()

    def write(self, pids: Iterable[int]) -> None:
        """Replaces the list, at once and whole."""
        infos = [info for pid in pids if (info := read_process(pid)) is not None]
        entries = [_Entry(info.pid, info.start, self._boot_id) for info in infos]
        draft = self._path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(entries))
        draft.replace(self._path)

    def sweep(self) -> list[int]:
        """Kills what is left of the listed sessions, and forgets them. Returns the pids killed."""
        killed: list[int] = []
        for entry in self._read():
            if entry.boot_id == self._boot_id and self._is_ours(entry):
                killed += kill_session(entry.pid)
        if killed:
            logger.warning("killed processes that an earlier agent left behind: %s", killed)
        self.write(())
        return killed

    def _is_ours(self, entry: _Entry) -> bool:
        """Whether what has the session's number now is what was listed. With its leader gone, the number may belong to
        a later session that has lost its leader too: the members' environment tells."""
        leader = read_process(entry.pid)
        if leader is not None and leader.state not in "ZX":
            return leader.start == entry.start
        members = session_members(entry.pid)
        return bool(members) and all(self._has_mark(member.pid) for member in members)

    def _has_mark(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def _read(self) -> list[_Entry]:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._path.read_bytes(), type=list[_Entry])
        return []
