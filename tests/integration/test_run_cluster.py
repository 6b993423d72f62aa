"""launcher/run_cluster.sh itself, in a clone that is set up: detached and in the foreground, with the demo model.

Setting up an empty clone is what tests/run.sh has done before it came here.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.demo_server import free_port
from tests.integration.test_serve_command import DEADLINE_S, assert_port_is_free, tree, wait_gone

ROOT = Path(__file__).resolve().parents[2]
RUN_CLUSTER = str(ROOT / "launcher" / "run_cluster.sh")

pytestmark = pytest.mark.skipif(
    not list((ROOT / ".venv").glob(".sonar-stamp*")), reason="this clone was not set up by tests/run.sh"
)


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    yield environ
    subprocess.run([RUN_CLUSTER, "stop", "--all", "--now"], env=environ, timeout=DEADLINE_S, capture_output=True)


def shown_curl(output: str) -> str:
    """The command that the start has printed."""
    (line,) = [line for line in output.splitlines() if line.startswith("  curl ")]
    return line


def test_demo_detached_prints_a_curl_that_works_then_status_and_stop(environ: dict[str, str]) -> None:
    port = free_port()

    def run_cluster(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [RUN_CLUSTER, *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)

    started = run_cluster("demo", "--detach", "--port", str(port), "--threads", "1")
    assert started.returncode == 0, started.stdout + started.stderr
    answered = subprocess.run(shown_curl(started.stdout), shell=True, capture_output=True, timeout=DEADLINE_S)
    assert b'"finish_reason"' in answered.stdout, answered
    assert f"{port}  ready  smollm2-135m" in run_cluster("status").stdout
    assert run_cluster("stop", "--port", str(port)).returncode == 0
    assert_port_is_free(port)


def test_ctrl_c_on_the_demo_leaves_no_process_and_no_socket(environ: dict[str, str]) -> None:
    port = free_port()
    process = subprocess.Popen(
        [RUN_CLUSTER, "demo", "--port", str(port), "--threads", "1"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    shown = ""
    while "  curl " not in shown:
        line = process.stdout.readline()
        assert line, shown
        shown += line
    assert httpx.get(f"http://127.0.0.1:{port}/ready", timeout=DEADLINE_S).status_code == 200
    processes = tree(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(DEADLINE_S) == 0
    wait_gone(processes, 1.0)
    assert_port_is_free(port)
    assert not any(c.laddr.port == port for p in processes if p.is_running() for c in p.net_connections())
    assert not psutil.pid_exists(process.pid)
