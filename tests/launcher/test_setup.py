"""launcher/setup.sh with its slow stages replaced: stamps, failures, locks, interruption, choice of a Python.

The real installation is what tests/run.sh itself goes through.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[2]
# A virtual environment that is only a link to this Python, and stages that count their calls.
STUBS = f"""
make_venv() {{ mkdir -p "$VENV/bin" && ln -sf {sys.executable} "$VENV/bin/python" && echo venv >>"$ROOT/calls"; }}
install_torch() {{ echo torch >>"$ROOT/calls"; }}
install_package() {{ echo "package $1" >>"$ROOT/calls"; }}
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "launcher").mkdir()
    shutil.copy(REPO / "launcher" / "setup.sh", tmp_path / "launcher")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return tmp_path


def script(clone: Path, body: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", f"ROOT={clone}; source {clone}/launcher/setup.sh; {STUBS}\n{body}"]


def run(clone: Path, body: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        script(clone, body), capture_output=True, text=True, timeout=60, env={**os.environ, "TERM": "dumb", **environ}
    )


def calls(clone: Path) -> list[str]:
    file = clone / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_a_second_set_up_only_compares_hashes(clone: Path) -> None:
    first = run(clone, "sonar_setup")
    assert first.returncode == 0, first.stderr
    assert "done: torch" in first.stderr and "Set up in" in first.stderr
    assert calls(clone) == ["venv", "torch", "package "]
    assert run(clone, "sonar_setup").stderr == ""
    assert len(calls(clone)) == 3


@pytest.mark.parametrize("file", ["pyproject.toml", "csrc/kernel.cpp", "CMakeLists.txt", "launcher/setup.sh"])
def test_a_changed_ingredient_sets_up_again(clone: Path, file: str) -> None:
    (clone / "csrc").mkdir()
    (clone / "csrc" / "kernel.cpp").write_text("")
    (clone / "CMakeLists.txt").write_text("")
    run(clone, "sonar_setup")
    with (clone / file).open("a") as handle:
        handle.write("# changed\n")
    assert run(clone, "sonar_setup").returncode == 0
    assert calls(clone).count("torch") == 2
    run(clone, "sonar_setup")
    assert calls(clone).count("torch") == 2


def test_the_extra_is_installed_once_and_will_do_for_a_plain_start(clone: Path) -> None:
    run(clone, "sonar_setup")
    run(clone, "sonar_setup dev")
    assert calls(clone) == ["venv", "torch", "package ", "venv", "torch", "package dev"]
    run(clone, "sonar_setup; sonar_setup dev")
    assert len(calls(clone)) == 6


def test_a_machine_without_a_compiler_is_set_up_and_told(clone: Path) -> None:
    blind = 'command() { [ "$*" != "-v c++" ] && builtin command "$@"; }\n'
    done = run(clone, blind + "sonar_setup; echo reached")
    assert done.returncode == 0 and done.stdout == "reached\n", done.stderr
    assert "kernels were not built" in done.stderr
    assert run(clone, blind + "sonar_setup").stderr == ""
    assert run(clone, 'command() { builtin command "$@" || echo /usr/bin/c++; }; sonar_setup').returncode == 0
    assert calls(clone).count("torch") == 2, "a compiler that came later is a reason to set up again"


def test_a_failed_stage_says_so_and_is_taken_up_again(clone: Path) -> None:
    failed = run(clone, "install_torch() { echo no space left; return 1; }; sonar_setup; echo reached")
    assert failed.returncode == 1 and "reached" not in failed.stdout
    assert "failed: torch" in failed.stderr and "no space left" in failed.stderr
    assert run(clone, "sonar_setup").returncode == 0
    assert calls(clone)[-2:] == ["torch", "package "]


def test_two_set_ups_at_once_install_once(clone: Path) -> None:
    slow = 'install_torch() { echo torch >>"$ROOT/calls"; sleep 1; }; sonar_setup'
    first = subprocess.Popen(script(clone, slow), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while "torch" not in calls(clone):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = run(clone, slow)
    assert "waiting for it" in second.stderr and second.returncode == 0
    assert first.wait(20) == 0
    assert calls(clone).count("torch") == 1
    assert first.stderr is not None
    first.stderr.close()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_set_up_leaves_no_process_and_no_stamp(clone: Path, sent: signal.Signals) -> None:
    body = 'install_torch() { echo torch >>"$ROOT/calls"; bash -c "sleep 47; true"; }; sonar_setup'
    process = subprocess.Popen(script(clone, body), stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 20
    while not (tree := _sleepers(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(sent)
    assert process.wait(20) == 130
    _, alive = psutil.wait_procs(tree, timeout=10)
    assert alive == []
    assert not (clone / ".venv" / ".sonar-stamp").exists()
    assert run(clone, "sonar_setup").returncode == 0


def _sleepers(pid: int) -> list[psutil.Process]:
    """The interrupted stage's processes, once its `sleep 47` runs."""
    children = psutil.Process(pid).children(recursive=True)
    try:
        return children if any(child.cmdline() == ["sleep", "47"] for child in children) else []
    except psutil.NoSuchProcess:
        return []


def fake_python(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


OLD = 'case "$*" in --version) echo Python 3.10.2;; *) exit 1;; esac'
NO_VENV = 'case "$*" in *ensurepip*) exit 1;; *print*) echo 3.12;; *) exit 0;; esac'


def find(clone: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """find_python with nothing on PATH but `folder` and the tools it uses."""
    for tool in ("head", "bash"):
        (folder / tool).symlink_to(shutil.which(tool) or "")
    return run(clone, f'PATH={folder}; find_python; echo "$PYTHON"', SONAR_PYTHON="")


def test_the_first_python_that_really_works_is_taken(clone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    fake_python(folder, "python3", OLD)
    fake_python(folder, "python3.11", "exit 127")  # a version manager's name without a Python behind it
    (folder / "python3.12").symlink_to(sys.executable)
    assert find(clone, folder).stdout == f"{folder}/python3.12\n"


def test_too_old_a_python_is_named_with_the_remedy(clone: Path, tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3", OLD)
    done = find(clone, tmp_path / "bin")
    assert done.returncode == 1
    assert "python3 (Python 3.10.2)" in done.stderr and "apt-get install -y python3 python3-venv" in done.stderr


def test_a_python_without_venv_gets_the_package_named(clone: Path, tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3", NO_VENV)
    done = find(clone, tmp_path / "bin")
    assert done.returncode == 1 and "apt-get install -y python3.12-venv" in done.stderr


def run_cluster(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(REPO / "launcher" / "run_cluster.sh", clone / "launcher")
    return subprocess.run(
        [clone / "launcher" / "run_cluster.sh", *arguments], capture_output=True, text=True, timeout=60
    )


def test_a_busy_port_is_said_before_anything_is_installed(clone: Path) -> None:
    import socket

    shutil.copytree(REPO / "launcher" / "cli", clone / "launcher" / "cli")
    shutil.copy(REPO / "launcher" / "__init__.py", clone / "launcher")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        for arguments in (["--port", port], [f"--port={port}", "--host", "127.0.0.1"]):
            done = run_cluster(clone, "demo", *arguments)
            assert done.returncode == 2 and f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert not (clone / ".venv").exists()


def test_usage_and_status_need_no_set_up(clone: Path) -> None:
    assert "run_cluster.sh demo" in run_cluster(clone).stdout
    done = run_cluster(clone, "status")
    assert done.returncode == 3 and "nothing is set up here yet" in done.stderr
    assert not (clone / ".venv").exists()
