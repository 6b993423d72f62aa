"""A real demo server as a user starts it, for tests of what users see: `sonar serve smollm2-135m --detach`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODEL = "smollm2-135m"
SONAR = [sys.executable, "-m", "launcher.cli.main"]
START_TIMEOUT_S = 300


@dataclass(frozen=True)
class DemoServer:
    """A running server. environ: what other `sonar` commands need to find it."""

    port: int
    environ: dict[str, str]

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running_demo(state_home: Path, *flags: str) -> Iterator[DemoServer]:
    """Starts a detached server with one computing thread, waits until it is ready, and stops it in the end."""
    environ = {"XDG_STATE_HOME": str(state_home)}
    port = free_port()
    command = [*SONAR, "serve", MODEL, "--detach", "--port", str(port), "--threads", "1", *flags]
    merged = {**os.environ, **environ}
    done = subprocess.run(command, env=merged, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    try:
        yield DemoServer(port, {**environ, "SONAR_URL": f"http://127.0.0.1:{port}"})
    finally:
        stopped = subprocess.run([*SONAR, "stop", "--port", str(port)], env=merged, timeout=60, capture_output=True)
    assert stopped.returncode == 0, stopped.stdout
