"""What this user's running servers left on disk: one small JSON file a port, so that `status` and `stop` find them.

A record names a process by pid and start time together, because a pid alone is used again. Knows nothing of
HTTP or of what a server does. Called by `launcher.cli.serve`, `status` and `stop`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sonar.process import is_running


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A server started by this user.

    Attributes:
        pid, start_ticks: the process and its start, as `sonar.process` tells it. started_unix_s: the same for people.
        host, port: where its HTTP server listens. model: name it serves.
        log: file its output goes to; empty when it runs in a terminal.
        control, token_file: of a cluster's head: where agents and operators speak to it, and the token they need.
    """

    pid: int
    start_ticks: int
    started_unix_s: float
    host: str
    port: int
    model: str
    log: str = ""
    control: str = ""
    token_file: str = ""
    is_https: bool = False

    @property
    def url(self) -> str:
        """Base address for a client on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "https" if self.is_https else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    def is_running(self) -> bool:
        """Whether the process still runs; false when its pid now belongs to another one."""
        return is_running(self.pid, self.start_ticks)


class StateDir:
    """Owns the folder of server records and logs (mode 700; no other user reads a log)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_user(cls, environ: Mapping[str, str]) -> StateDir:
        """$XDG_STATE_HOME/sonar, by default ~/.local/state/sonar."""
        base = environ.get("XDG_STATE_HOME")
        return cls((Path(base) if base else Path.home() / ".local" / "state") / "sonar")

    def log_file(self, port: int) -> Path:
        """Where a detached server on this port writes; the folder exists after the call."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.path / f"server-{port}.log"

    def server_dir(self, port: int) -> Path:
        """The own folder of the server on this port. Port 0 (any free one) gets a new folder each time."""
        return self.path / (f"server-{port}" if port else f"server-any-{os.getpid()}")

    def write(self, record: ServerRecord) -> None:
        """Replaces the record of the port at once, so that a reader never sees half a file."""
        target = self._file(record.port)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = target.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(target)

    def remove(self, port: int, pid: int) -> None:
        """Forgets the server of this port unless another process has taken the record over."""
        record = self._read(self._file(port))
        if record is None or record.pid == pid:
            self._file(port).unlink(missing_ok=True)

    def records(self) -> list[ServerRecord]:
        """Servers that still run, by port. Records of ended ones are removed; unreadable files are left alone."""
        alive = []
        for file in sorted(self.path.glob("server-*.json")):
            record = self._read(file)
            if record is None:
                continue
            if record.is_running():
                alive.append(record)
            else:
                file.unlink(missing_ok=True)
        return sorted(alive, key=lambda record: record.port)

    def _file(self, port: int) -> Path:
        return self.path / f"server-{port}.json"

    @staticmethod
    def _read(file: Path) -> ServerRecord | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(file.read_bytes(), type=ServerRecord)
        return None
