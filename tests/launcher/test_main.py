"""The `sonar` command itself: help without torch, one-line errors, exit codes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping

import pytest

from launcher.cli import version
from launcher.cli.main import COMMANDS, main
from sonar.errors import ConfigError, RemoteError


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    out = run_python(
        "import sys; from launcher.cli.main import main; main(['--help']); "
        "print([m for m in ('torch', 'transformers', 'fastapi', 'httpx', 'numpy') if m in sys.modules])"
    )
    assert out.strip().endswith("[]")
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_commands_help_imports_no_torch(name: str) -> None:
    out = run_python(
        "import sys; from launcher.cli.main import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "except SystemExit as end: print('exit', end.code)\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert f"usage: sonar {name}" in out and out.endswith("exit 0\n[]\n")


def test_unknown_commands_and_flags_are_the_callers_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert "unknown command 'serv'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["version", "--nonsense"])
    assert caught.value.code == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("sonar ")
    assert main(["--version"]) == 0


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("block_size=7; choose 8"), 2, "error: block_size=7; choose 8\n"),
        (RemoteError("lead died", node="a", rank=0, step=4), 1, "error: lead died (node=a rank=0 last_step=4)\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (KeyError("x"), 1, "error: internal: KeyError: 'x' (traceback: --log-level debug)\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line_without_a_traceback(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
        raise error

    monkeypatch.setattr(version, "run", fail)
    assert main(["version"]) == code
    assert capsys.readouterr().err == line


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
        raise KeyError("x")

    monkeypatch.setattr(version, "run", fail)
    assert main(["version", "--log-level", "debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
