"""The supervisor of a host's workers with real processes, and its parts. No head: the workers wait for one in vain."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.messages import StartFailed, StartWorker, WorkerExited, WorkerRef, WorkerStarted
from launcher.engines import ENGINES, engine_table
from launcher.hardware import inspect_hardware, nvidia_devices, parse_nvidia_smi
from launcher.leftovers import Leftovers
from launcher.supervisor import Supervisor
from launcher.worker_log import WorkerLog
from sonar.config import EngineConfig
from sonar.errors import ConfigError
from sonar.process import describe_exit, is_running, kill_session, read_process, session_members
from sonar.transport import Address

MARK = "SONAR_TEST_MARK=1"


@pytest.fixture
def supervisor(tmp_path):
    made = Supervisor(tmp_path, MARK, lambda: [Address("127.0.0.1", 1)], "token", engine_table([]), time.monotonic)
    yield made
    made.kill_all()
    collect(made, len(made.running()))


def start_message(replica_id: str = "m-0", engine: str = "sonar", incarnation: int = 1) -> StartWorker:
    ref = WorkerRef(replica_id=replica_id, incarnation=incarnation)
    return StartWorker(worker=ref, world_size=1, devices=[], engine=engine, engine_config=EngineConfig("none"))


def collect(supervisor: Supervisor, count: int, timeout_s: float = 10.0) -> list[WorkerExited]:
    """As the agent does: waits on the descriptors and for deadlines."""
    reports: list[WorkerExited] = []
    end = time.monotonic() + timeout_s
    while len(reports) < count:
        assert time.monotonic() < end, f"{len(reports)} of {count} reports"
        select.select(supervisor.pidfds(), [], [], 0.05)
        supervisor.tick()
        reports += supervisor.reap()
    return reports


def test_an_unknown_engine_and_a_second_start_are_refused(supervisor) -> None:
    failed = supervisor.start(start_message(engine="other"))
    assert isinstance(failed, StartFailed) and failed.permanent and "known: sonar" in failed.error
    assert isinstance(supervisor.start(start_message()), WorkerStarted)
    assert isinstance(supervisor.start(start_message()), StartFailed)


def test_a_kill_right_after_the_start_is_not_lost(supervisor) -> None:
    """The new process leads no group yet."""
    started = supervisor.start(start_message())
    supervisor.kill("m-0", 1)
    (report,) = collect(supervisor, 1)
    assert (report.pid, report.signal, report.was_asked) == (started.pid, signal.SIGKILL, True)
    assert supervisor.running() == [] and read_process(started.pid) is None


def test_only_the_named_incarnation_is_killed(supervisor) -> None:
    supervisor.start(start_message("a"))
    supervisor.start(start_message("b"))
    supervisor.kill("a", 2)
    supervisor.kill("b", 1)
    (report,) = collect(supervisor, 1)
    assert report.worker.replica_id == "b"
    assert [worker.worker.replica_id for worker in supervisor.running()] == ["a"]


def wait_for_handler(pid: int) -> None:
    """Until the worker's own SIGTERM handler is installed (proc(5), SigCgt)."""
    end = time.monotonic() + 10
    while True:
        (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
        if int(mask, 16) >> (signal.SIGTERM - 1) & 1:
            return
        assert time.monotonic() < end
        time.sleep(0.01)


def test_sigterm_ends_a_worker_and_one_that_does_not_hear_is_killed(supervisor) -> None:
    hears, stuck = supervisor.start(start_message("a")), supervisor.start(start_message("b"))
    for started in (hears, stuck):
        wait_for_handler(started.pid)
    os.kill(stuck.pid, signal.SIGSTOP)
    began = time.monotonic()
    supervisor.stop(stuck.worker, 0.3)
    supervisor.stop(hears.worker, 10.0)
    reports = {report.worker.replica_id: report for report in collect(supervisor, 2)}
    assert (reports["a"].exit_code, reports["a"].signal) == (0, 0)
    assert reports["b"].signal == signal.SIGKILL and time.monotonic() - began >= 0.3


def test_a_death_by_another_hand_was_not_asked_for(supervisor) -> None:
    started = supervisor.start(start_message())
    os.kill(started.pid, signal.SIGKILL)
    (report,) = collect(supervisor, 1)
    assert not report.was_asked and report.exit_code == -1


def test_a_log_gives_the_tail_of_this_incarnation_and_is_kept_short(tmp_path) -> None:
    first = WorkerLog(tmp_path, "m-0", 0)
    first.path.write_text("of an earlier incarnation\n")
    log = WorkerLog(tmp_path, "m-0", 0)
    with log.path.open("a") as writer:
        print("hello", file=writer, flush=True)
        assert log.tail() == "hello"
        assert not log.trim(1000)
        print("x" * 2000, file=writer, flush=True)
        assert log.trim(1000)
        print("after", file=writer, flush=True)
    assert log.path.read_text() == "after\n" and log.tail() == "after"
    assert "hello" in log.path.with_suffix(".log.1").read_text()


SESSION = "import os, subprocess, sys, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)\n"


@contextlib.contextmanager
def session(mark: str):
    """A process that leads a session, and its child; (leader, child pid)."""
    name, _, value = mark.partition("=")
    leader = subprocess.Popen(
        [sys.executable, "-c", SESSION],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, name: value},
    )
    assert leader.stdout is not None
    try:
        yield leader, int(leader.stdout.readline())
    finally:
        kill_session(leader.pid)
        leader.wait()


def test_a_sweep_kills_what_an_earlier_agent_left_and_forgets_it(tmp_path) -> None:
    with session(MARK) as (leader, child), session(MARK) as (orphans_leader, orphan):
        Leftovers(tmp_path / "list", MARK).write([leader.pid, orphans_leader.pid])
        orphans_leader.kill()
        orphans_leader.wait()
        killed = Leftovers(tmp_path / "list", MARK).sweep()
        assert sorted(killed) == sorted([leader.pid, child, orphan])
        assert not session_members(leader.pid) and not session_members(orphans_leader.pid)
        assert Leftovers(tmp_path / "list", MARK).sweep() == []


def test_a_sweep_spares_strangers(tmp_path) -> None:
    with session("OTHER=1") as (leader, _), session("OTHER=1") as (gone, orphan):
        entries = Leftovers(tmp_path / "list", MARK)
        entries.write([leader.pid, gone.pid])
        text = (tmp_path / "list").read_text()
        info = read_process(leader.pid)
        (tmp_path / "list").write_text(text.replace(str(info.start), str(info.start - 1)))  # the pid was used again
        gone.kill()
        gone.wait()
        assert entries.sweep() == []
        assert is_running(leader.pid, info.start) and read_process(orphan) is not None


def test_a_damaged_list_sweeps_nothing(tmp_path) -> None:
    (tmp_path / "list").write_text("{")
    assert Leftovers(tmp_path / "list", MARK).sweep() == []


def test_engines_are_named_on_the_host_that_runs_them() -> None:
    assert engine_table([]) == ENGINES
    assert engine_table(["fake=a.b:make"])["fake"] == "a.b:make"
    with pytest.raises(ConfigError, match="write NAME=MODULE:FUNCTION"):
        engine_table(["os.system"])


def test_hardware_facts() -> None:
    facts = inspect_hardware()
    assert facts.cpu_cores >= 1 and facts.memory_bytes >= facts.memory_available_bytes > 0 and facts.boot_id
    assert nvidia_devices("no-such-program-here") == []


def test_gpus_are_read_from_the_drivers_tool(caplog) -> None:
    rows = "0, NVIDIA H200, 143771, GPU-aa\n1, NVIDIA H200, 143771, GPU-bb\nno devices were found\n"
    devices = parse_nvidia_smi(rows)
    assert [(d.index, d.uuid, d.memory_bytes >> 30) for d in devices] == [(0, "GPU-aa", 140), (1, "GPU-bb", 140)]
    assert "no devices were found" in caplog.text


def test_exits_have_words() -> None:
    assert [describe_exit(code) for code in (0, 3, -9, -200)] == [
        "exit code 0",
        "exit code 3",
        "signal SIGKILL",
        "signal 200",
    ]
