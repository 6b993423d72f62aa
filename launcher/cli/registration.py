"""A server's record in the user's state folder, from the moment it listens until it ends.

Called by `sonar serve` and `sonar head`; read by `status`, `stop` and the commands of an operator.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from launcher.cli.state import ServerRecord, StateDir
from sonar.process import read_process


class Registration:
    """Owner of this process's record."""

    def __init__(self, state: StateDir, host: str, model: str, *, is_https: bool = False) -> None:
        self._state = state
        self._host = host
        self._model = model
        self._is_https = is_https
        self._record: ServerRecord | None = None

    def register(self, port: int, control: str = "", token_file: str = "") -> str:
        """Writes the record; returns the base address for clients on this machine."""
        info = read_process(os.getpid())
        assert info is not None, "no /proc: only Linux is supported"
        log = self._state.log_file(port)
        self._record = ServerRecord(
            pid=info.pid,
            start_ticks=info.start,
            started_unix_s=time.time(),
            host=self._host,
            port=port,
            model=self._model,
            log=str(log) if _writes_to(log) else "",
            control=control,
            token_file=token_file,
            is_https=self._is_https,
        )
        self._state.write(self._record)
        return self._record.url

    def remove(self) -> None:
        """Forgets the server, if it ever listened."""
        if self._record is not None:
            self._state.remove(self._record.port, self._record.pid)


def _writes_to(log: Path) -> bool:
    """Whether this process's output goes to that file, as it does when it was started by --detach."""
    try:
        return os.path.samestat(os.fstat(sys.stderr.fileno()), log.stat())
    except OSError:
        return False
