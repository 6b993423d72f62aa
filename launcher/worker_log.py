"""The log file of a rank: where it lies, its last lines, and its size limit.

The worker writes to the file itself, so that a crash's last words are there and an agent's death loses nothing; the
agent trims it. Called by `launcher.supervisor`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

TAIL_BYTES = 4096
MAX_LOG_BYTES = 16 << 20


class WorkerLog:
    """One rank's log file; appended to over all incarnations."""

    def __init__(self, folder: Path, replica_id: str, rank: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / f"{replica_id}.{rank}.log"
        self._begin = self._size()

    def tail(self) -> str:
        """The last lines of this incarnation, at most TAIL_BYTES."""
        size = self._size()
        begin = min(self._begin, size)
        try:
            with self.path.open("rb") as file:
                file.seek(max(begin, size - TAIL_BYTES))
                return file.read(TAIL_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""

    def trim(self, max_bytes: int = MAX_LOG_BYTES) -> bool:
        """Moves the content of a file that is too long to "<name>.1" and empties it. The writer appends, so it goes on
        at the new end; lines written while the content is copied may be lost. Returns whether it was too long."""
        if self._size() <= max_bytes:
            return False
        with contextlib.suppress(OSError):
            shutil.copyfile(self.path, self.path.with_suffix(".log.1"))
            os.truncate(self.path, 0)
            self._begin = 0
        return True

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0
