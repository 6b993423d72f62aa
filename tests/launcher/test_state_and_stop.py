"""Records of running servers, and `status` and `stop` on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.cli.main import main
from launcher.cli.state import ServerRecord, StateDir
from launcher.cli.status import columns, duration, readiness
from sonar.process import read_process

from .fake_server import FakeServer

# A server with one child; with "stubborn" both ignore SIGTERM, as a hung process does.
PROGRAM = """
import signal, subprocess, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, sys, time\\n"
    "if sys.argv[1] == 'stubborn': signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "print('up', flush=True)\\ntime.sleep(60)", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
def end(*_):
    child.terminate(); child.wait(); sys.exit(0)
if sys.argv[1] != "stubborn":
    signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""


class Processes:
    """Starts servers, registers them in a state folder of the test, and ends what is left."""

    def __init__(self, state: StateDir) -> None:
        self.state = state
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, port: int, mode: str = "polite") -> ServerRecord:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, mode], stdout=subprocess.PIPE)
        self.started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        info = read_process(process.pid)
        assert info is not None
        record = ServerRecord(
            pid=process.pid,
            start_ticks=info.start,
            started_unix_s=time.time(),
            host="127.0.0.1",
            port=port,
            model="tiny",
        )
        self.state.write(record)
        return record

    def end(self) -> None:
        for process in self.started:
            for child in psutil.Process(process.pid).children() if process.poll() is None else []:
                child.kill()
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    owner = Processes(StateDir.of_user(os.environ))
    yield owner
    owner.end()


def tree_of(record: ServerRecord) -> list[psutil.Process]:
    parent = psutil.Process(record.pid)
    return [parent, *parent.children(recursive=True)]


def test_a_record_survives_the_disk_and_its_folder_is_private(processes: Processes) -> None:
    record = processes.start(port=5001)
    assert processes.state.records() == [record]
    assert processes.state.log_file(5001).parent.stat().st_mode & 0o777 == 0o700


def test_a_reused_pid_is_not_the_server(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = processes.start(port=5001)
    stale = ServerRecord(
        pid=stranger.pid, start_ticks=stranger.start_ticks - 1, started_unix_s=0, host="127.0.0.1", port=5001, model="x"
    )
    processes.state.write(stale)
    assert main(["stop", "--port", "5001"]) == 3
    assert stranger.is_running(), "a process that only shares the pid was signalled"
    assert processes.state.records() == []
    assert "no server runs on port 5001" in capsys.readouterr().out


def test_dead_and_zombie_processes_do_not_run(processes: Processes) -> None:
    record = processes.start(port=5001)
    for process in reversed(tree_of(record)):
        process.kill()
    deadline = time.monotonic() + 10
    while record.is_running():  # a zombie until this test's process waits for it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert processes.state.records() == []


def test_half_a_record_is_skipped_and_left_alone(processes: Processes) -> None:
    record = processes.start(port=5001)
    broken = processes.state.path / "server-5002.json"
    broken.write_text('{"pid": 1')
    assert processes.state.records() == [record]
    assert broken.exists()


def test_stop_ends_the_tree_and_forgets_it(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    record = processes.start(port=5001)
    tree = tree_of(record)
    assert len(tree) == 2
    assert main(["stop"]) == 0
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in tree)
    assert "port 5001: stopped (" in capsys.readouterr().out
    assert processes.state.records() == [] and main(["stop"]) == 3


def test_stop_kills_what_does_not_listen_and_says_so(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    record = processes.start(port=5001, mode="stubborn")
    tree = tree_of(record)
    assert main(["stop", "--grace", "0.2"]) == 0
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in tree)
    assert "2 processes killed after the grace period" in capsys.readouterr().out


def test_several_servers_want_a_choice(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = processes.start(port=5001), processes.start(port=5002)
    assert main(["stop"]) == 2
    assert "5001, 5002" in capsys.readouterr().err and first.is_running() and second.is_running()
    assert main(["stop", "--port", "5002"]) == 0
    assert first.is_running() and not second.is_running()
    assert main(["stop", "--all"]) == 0
    assert not first.is_running()


def test_status_lists_servers_and_their_processes(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 3
    record = processes.start(port=5001)
    capsys.readouterr()
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "5001  no answer  tiny" in out
    assert all(f"pid {p.pid} " in out for p in tree_of(record))
    assert main(["status", "--port", "5002"]) == 3


def test_readiness_is_what_ready_says(fake_server: FakeServer) -> None:
    def record(port: int) -> ServerRecord:
        return ServerRecord(pid=1, start_ticks=0, started_unix_s=0, host="0.0.0.0", port=port, model="x")

    assert readiness(record(fake_server.server_address[1])) == "ready"
    fake_server.api_key = "k"  # this server then answers 401, which is not ready
    assert readiness(record(fake_server.server_address[1])) == "starting"
    assert readiness(record(9)) == "no answer"


def test_urls_are_for_clients_on_this_machine() -> None:
    def url(host: str) -> str:
        return ServerRecord(pid=1, start_ticks=0, started_unix_s=0, host=host, port=80, model="x").url

    assert [url("0.0.0.0"), url("::"), url("::1"), url("localhost")] == [
        "http://127.0.0.1:80",
        "http://[::1]:80",
        "http://[::1]:80",
        "http://localhost:80",
    ]


def test_durations_and_columns_for_people() -> None:
    assert [duration(s) for s in (5, 300, 12000, 200000)] == ["5 s", "5 min", "3 h 20 min", "2 d 7 h"]
    assert columns([("A", "BB"), ("ccc", "d")]) == ["A    BB", "ccc  d"]
