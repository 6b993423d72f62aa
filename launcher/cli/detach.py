"""`sonar serve --detach`: starts the server as a process of its own, shows its output until it is ready, and leaves it.

The child is an ordinary `sonar serve` in a session of its own, with its output in the log file of its port. It is ended
again when it is not ready in time or the wait is interrupted: nobody should find a server that nobody waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.progress import READY_WORDS
from launcher.cli.state import ServerRecord, StateDir
from launcher.cli.status import readiness
from sonar.errors import SonarError

POLL_S = 0.2
BANNER_TIMEOUT_S = 2.0
END_TIMEOUT_S = 15.0


def start_detached(arguments: Sequence[str], state: StateDir, port: int, timeout_s: float) -> int:
    """Starts `sonar serve` with these arguments. Returns 0 once it is ready, else the code it ended with.

    Raises:
        SonarError: it is not ready within the time; it has been ended then.
    """
    log = state.log_file(port)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher.cli.main", "serve", *arguments, "--no-detach"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        record = _wait_until_ready(process, state, LogReader(log), time.monotonic() + timeout_s)
    except BaseException:
        end_group(process)
        raise
    if record is None:
        return process.returncode or 1
    print(f"Runs as pid {record.pid}, log in {log}\nEnd it with: sonar stop --port {record.port}")
    return 0


def _wait_until_ready(
    process: subprocess.Popen[bytes], state: StateDir, log: LogReader, deadline_s: float
) -> ServerRecord | None:
    """The record of the ready server; None when the process has ended."""
    while time.monotonic() < deadline_s:
        has_ended = process.poll() is not None
        text = log.read_new()
        print(text, end="", flush=True)
        if has_ended:
            return None
        record = next((r for r in state.records() if r.pid == process.pid), None)
        if record is not None and readiness(record) == "ready":
            _show_banner(text, log)
            return record
        time.sleep(POLL_S)
    raise SonarError(f"the server was not ready in time and has been ended; its log: {log.path}")


def _show_banner(text: str, log: LogReader) -> None:
    """The server may answer a moment before it says so; shows what it says."""
    deadline_s = time.monotonic() + BANNER_TIMEOUT_S
    while READY_WORDS not in text and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        text = log.read_new()
        print(text, end="", flush=True)


class LogReader:
    """Reads what has been added to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read_new(self) -> str:
        """Whole lines only, so that no character is cut."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(text) + len(newline)
        return (text + newline).decode(errors="replace")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM twice (end without draining), then SIGKILL to the process and whatever shares its session."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
