"""`sonar serve` before anything starts, and what it shows while the head comes up."""

from __future__ import annotations

import argparse
import io
import os
import socket
from pathlib import Path

import pytest

from cluster.config import check_name
from cluster.status import ClusterStatus, ReplicaStatus
from launcher.cli.detach import LogReader
from launcher.cli.main import main
from launcher.cli.progress import PhaseLine, StartDisplay, amount
from launcher.cli.serve import api_keys, deployment_name, is_loopback
from launcher.cli.state import ServerRecord, StateDir
from sonar.errors import ConfigError
from sonar.process import read_process
from sonar.transport import Address


def keys_of(*keys: str, file: Path | None = None, **environ: str) -> tuple[str, ...]:
    return api_keys(argparse.Namespace(api_key=list(keys), api_key_file=file), environ)


def test_keys_come_from_flags_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("from-file\n\n  padded  \none\n")
    assert keys_of() == ()
    assert keys_of("one", "two", file=file, SONAR_API_KEYS="two,three,") == (
        "one",
        "two",
        "three",
        "from-file",
        "padded",
    )


def test_a_key_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    empty = tmp_path / "keys.txt"
    empty.write_text("\n \n")
    for file in (empty, tmp_path / "absent.txt"):
        with pytest.raises(ConfigError, match=file.name):
            keys_of(file=file)


@pytest.mark.parametrize("model", ["smollm2-135m", "org/My Model", "../../etc", "a" * 300, "模型", "..", "-x-"])
def test_any_model_name_makes_a_deployment_name(model: str) -> None:
    check_name("deployment", deployment_name(model))


def test_loopback_is_told_from_the_rest() -> None:
    assert [is_loopback(h) for h in ("127.0.0.1", "127.1.2.3", "::1", "localhost")] == [True] * 4
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "some-host")] == [False] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model"], "no-such-model"),
        ([""], "MODEL is empty"),
        (["x.gguf"], "x.gguf"),
        (["smollm2-135m", "--block-size", "5"], "block_size=5"),
        (["smollm2-135m", "--port", "70000"], "0 to 65535"),
        (["smollm2-135m", "--host", "192.0.2.1"], "no address of this machine"),
        (["smollm2-135m", "--revision", "main"], "revision"),
        (["smollm2-135m", "--drain-timeout", "0"], "drain_s"),
        (["smollm2-135m", "--api-key-file", "/nonexistent/keys"], "/nonexistent/keys"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_starts(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    if "--port" not in arguments:
        arguments = [*arguments, "--port", "0"]
    assert main(["serve", *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert words in line


def test_a_damaged_file_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"junk")
    assert main(["serve", str(bad), "--port", "0"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count(str(bad)) == 1 and "Traceback" not in shown.err


def test_a_port_in_use_names_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    info = read_process(os.getpid())
    assert info is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["serve", "smollm2-135m", "--port", str(port)]) == 2
        assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err
        record = ServerRecord(
            pid=info.pid, start_ticks=info.start, started_unix_s=0, host="127.0.0.1", port=port, model="mine"
        )
        StateDir.of_user(os.environ).write(record)
        assert main(["serve", "smollm2-135m", "--port", str(port)]) == 2
        error = capsys.readouterr().err
        assert "for model mine" in error and f"sonar stop --port {port}" in error


def replica(state: str, phase: str = "", done: int = 0, total: int = 0, last_end: str = "") -> ReplicaStatus:
    return ReplicaStatus(
        replica_id="m-0",
        deployment="m",
        state=state,
        incarnation=1,
        state_s=0.0,
        phase=phase,
        done=done,
        total=total,
        note="",
        failures=0,
        last_end=last_end,
        is_permanent=False,
        log_tail="",
        nodes=[],
        pids=[],
        log_paths=[],
        num_open=0,
        stats=None,
    )


def status(*replicas: ReplicaStatus, is_stopping: bool = False) -> ClusterStatus:
    return ClusterStatus(nodes=[], replicas=list(replicas), num_open_requests=0, is_stopping=is_stopping)


def test_a_start_is_shown_phase_by_phase_then_the_address_once() -> None:
    out = io.StringIO()
    display = StartDisplay(
        "m", has_keys=False, on_listening=lambda port, control: f"http://h:{port}", stream=out, clock=lambda: 5.0
    )
    display.on_listening(Address("127.0.0.1", 80), Address("127.0.0.1", 81))
    display.on_status(status(replica("placing")))
    for done in (1, 2, 3):
        display.on_status(status(replica("loading", "load weights", done, 3)))
    assert "Ready" not in out.getvalue()
    display.on_status(status(replica("ready")))
    display.on_status(status(replica("ready")))
    text = out.getvalue()
    assert text.count("load weights") == 1 and text.count("Ready after 0.0 s: m on http://h:80") == 1
    assert "curl http://h:80/v1/chat/completions" in text and "Authorization" not in text


def test_a_lost_replica_and_its_return_are_shown() -> None:
    out = io.StringIO()
    display = StartDisplay("m", has_keys=True, on_listening=lambda port, control: "", stream=out)
    display.on_status(status(replica("ready")))
    assert "Authorization: Bearer" in out.getvalue()
    display.on_status(status(replica("backoff", last_end="signal SIGKILL")))
    display.on_status(status(replica("ready")))
    assert "m-0: backoff: signal SIGKILL" in out.getvalue() and "m-0 is ready again" in out.getvalue()
    assert out.getvalue().count("Ready after") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_rewritten_and_not_too_often() -> None:
    out, now = Terminal(), [0.0]
    line = PhaseLine(out, lambda: now[0])
    for done in range(100):
        now[0] += 0.01
        line.show("download x", done << 20, 93 << 20)
    line.end()
    assert 4 <= out.getvalue().count("\r") <= 8
    assert out.getvalue().endswith("download x (1.0 s)\n") and out.getvalue().count("\n") == 1


def test_amounts() -> None:
    assert [amount(0, 0), amount(3, 30), amount(5, 0), amount(3 << 20, 93 << 20), amount(3 << 20, 0)] == [
        "",
        "3/30",
        "5",
        "3/93 MiB",
        "3 MiB",
    ]


def test_a_log_is_read_once_and_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw\xc3")
    reader = LogReader(path)
    assert reader.read_new() == "one\n"
    assert reader.read_new() == ""
    with path.open("ab") as file:
        file.write(b"\xb6\n")
    assert reader.read_new() == "tw\u00f6\n"
