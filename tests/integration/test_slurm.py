"""The batch script of examples/slurm, run as it is, with programs in the places of Slurm's `srun` and `scontrol`."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.hosts import DEADLINE_S, ROOT, SONAR
from tests.tiny import write_tiny_folder

SCRIPT = ROOT / "examples/slurm/sonar.sbatch"
# Two tasks on this host. Like the real one it hands SIGTERM on and waits for its tasks.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
trap 'kill -TERM $head $node; wait $node; wait $head; exit' TERM
SLURM_PROCID=1 SLURMD_NODENAME=node-b "$@" & node=$!
SLURM_PROCID=0 SLURMD_NODENAME=node-a "$@" & head=$!
wait $head $node
"""


def test_shellcheck_accepts_it() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o700)


def group(number: int) -> list[int]:
    """Processes of a group."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            found += [pid] if os.getpgid(pid) == number else []
    return found


def test_a_job_serves_and_ends_without_leftovers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token, config, log = tmp_path / "join.token", tmp_path / "cluster.toml", tmp_path / "job.log"
    model = write_tiny_folder("llama", tmp_path / "tiny")
    config.write_text(f"""
[http]
port = 0
[network]
host = "127.0.0.1"
control_port = {port}
[security]
token_file = "{token}"
[nodes]
head_runs_workers = false
[[deployment]]
name = "tiny"
model = "{model}"
[deployment.engine]
device = "cpu"
threads = 1
[deployment.cache]
memory_bytes = "16MiB"
""")
    write_program(tmp_path / "bin/srun", SRUN)
    write_program(
        tmp_path / "bin/scontrol", '#!/bin/sh\n[ "$*" = "show hostnames a-b" ] && printf "127.0.0.1\\nb\\n"\n'
    )
    write_program(
        tmp_path / "clone/launcher/run_cluster.sh", f'#!/bin/sh\ncd {ROOT} && exec {shlex.join(SONAR)} "$@"\n'
    )
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "a-b",
        "SONAR_DIR": str(tmp_path / "clone"),
        "SONAR_CONTROL_PORT": str(port),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    with log.open("wb") as output:
        command = ["bash", str(SCRIPT), str(config), str(token)]
        job = subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while "1 replicas on node-b" not in log.read_text():
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        job.send_signal(signal.SIGTERM)
        assert job.wait(DEADLINE_S) == 0, log.read_text()
        while left := group(job.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
