"""`sonar serve` as a user runs it, with a tiny model: detach, status, stop, signals, crashes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.demo_server import SONAR, free_port
from tests.tiny import write_tiny_folder

DEADLINE_S = 60.0
FLAGS = ["--threads", "1", "--kv-cache-memory", "8MiB", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder("llama", tmp_path_factory.mktemp("model") / "tiny-llama"))


@dataclass
class User:
    """Runs `sonar` commands with a state folder of the test's own, and ends what they left."""

    state_home: Path
    port: int

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.state_home)}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sonar(self, *arguments: str, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SONAR, *arguments],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def serve(self, model: str, *flags: str) -> subprocess.Popen[str]:
        """In the foreground; returns once it is ready."""
        process = subprocess.Popen(
            [*SONAR, "serve", model, "--port", str(self.port), *FLAGS, *flags],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        shown = ""
        while "Ready after" not in shown:
            line = process.stdout.readline()
            assert line, shown
            shown += line
        return process


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    user = User(tmp_path, free_port())
    yield user
    user.sonar("stop", "--all", "--now", "--grace", "10")


def tree(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def wait_gone(processes: list[psutil.Process], timeout_s: float) -> None:
    """Waits until none runs; those of dead parents are nobody's children, so each is looked at."""
    deadline = time.monotonic() + timeout_s
    while left := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


def assert_port_is_free(port: int) -> None:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def complete(user: User, **headers: str) -> httpx.Response:
    body = {"model": "tiny-llama", "prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{user.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S)


def test_detached_life(user: User, model: str) -> None:
    started = user.sonar("serve", model, "--detach", "--port", str(user.port), *FLAGS)
    assert started.returncode == 0, started.stdout + started.stderr
    assert "Ready after" in started.stdout and f"tiny-llama on {user.url}" in started.stdout
    assert "sonar stop" in started.stdout
    assert complete(user).json()["usage"]["completion_tokens"] == 5

    listed = user.sonar("status")
    assert listed.returncode == 0 and f"{user.port}  ready  tiny-llama" in listed.stdout
    assert all(f": {role} pid" in listed.stdout for role in ("head", "agent", "worker"))
    pids = [int(line.split("pid ")[1].split()[0]) for line in listed.stdout.splitlines() if " pid " in line]
    processes = [psutil.Process(pid) for pid in pids]

    again = user.sonar("serve", model, "--port", str(user.port), *FLAGS)
    assert again.returncode == 2 and f"sonar stop --port {user.port}" in again.stderr

    stopped = user.sonar("stop")
    assert stopped.returncode == 0 and f"port {user.port}: stopped (" in stopped.stdout
    wait_gone(processes, 1.0)
    assert_port_is_free(user.port)
    assert user.sonar("status").returncode == 3


def test_more_devices_than_the_host_has_is_a_mistake_that_ends_the_start(user: User, model: str) -> None:
    failed = user.sonar("serve", model, "--port", str(user.port), "--device", "cuda", "--tp", "99")
    assert failed.returncode == 2
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("error: ")]
    assert "CUDA device" in line and "use --device cpu" in line


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(user: User, model: str, sent: signal.Signals) -> None:
    process = user.serve(model)
    processes = tree(process.pid)
    assert len(processes) >= 3
    process.send_signal(sent)
    assert process.wait(DEADLINE_S) == 0
    wait_gone(processes, 1.0)
    assert_port_is_free(user.port)
    assert list((user.state_home / "sonar").glob("*.json")) == []


def test_ctrl_c_reaches_the_whole_terminal_and_still_ends_in_order(user: User, model: str) -> None:
    process = user.serve(model)
    processes = tree(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    assert process.wait(DEADLINE_S) == 0
    assert process.stdout is not None and "Traceback" not in process.stdout.read()
    wait_gone(processes, 1.0)


def test_a_killed_head_leaves_nothing_and_a_new_one_starts_at_once(user: User, model: str) -> None:
    process = user.serve(model)
    processes = tree(process.pid)
    process.kill()
    process.wait(DEADLINE_S)
    wait_gone(processes, 10.0)
    assert user.sonar("status").returncode == 3
    user.serve(model)
    assert complete(user).status_code == 200


def test_keys_guard_the_api(user: User, model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    user.serve(model, "--api-key-file", str(keys), "--served-model-name", "tiny-llama")
    assert complete(user).status_code == 401
    assert complete(user, Authorization="Bearer second").status_code == 200
    assert httpx.get(f"{user.url}/ready", timeout=DEADLINE_S).status_code == 200


def test_a_model_that_cannot_be_served_ends_the_start_with_the_reason(user: User, model: str, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in Path(model).iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for more in ([], ["--detach"]):
        done = user.sonar("serve", str(damaged), "--port", str(user.port), *FLAGS, *more)
        assert done.returncode != 0
        assert "model.safetensors" in done.stdout + done.stderr, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert_port_is_free(user.port)
    assert user.sonar("status").returncode == 3


def test_a_start_that_takes_too_long_is_ended(user: User, model: str) -> None:
    done = user.sonar("serve", model, "--detach", "--port", str(user.port), *FLAGS, "--ready-timeout", "0.3")
    assert done.returncode == 1 and "not ready in time" in done.stderr
    assert user.sonar("status").returncode == 3
    assert_port_is_free(user.port)


def test_an_interrupted_wait_ends_the_server(user: User, model: str) -> None:
    command = [*SONAR, "serve", model, "--detach", "--port", str(user.port), *FLAGS]
    process = subprocess.Popen(command, env=user.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert any("listening" in line for line in process.stdout), "it ended before it listened"
    processes = tree(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    wait_gone(processes, 5.0)
    assert_port_is_free(user.port)


def test_the_module_runs_without_an_installed_script() -> None:
    done = subprocess.run([sys.executable, "-m", "launcher.cli.main", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(".") == 2
