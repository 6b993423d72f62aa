"""The systemd units of examples/: systemd accepts them, and the commands in them are commands of Sonar."""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "examples/systemd").glob("*.service"))


def command_of(unit: Path) -> list[str]:
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    program, *arguments = line.removeprefix("ExecStart=").split()
    assert program.endswith("launcher/run_cluster.sh")
    return arguments


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_its_command_is_understood(unit: Path) -> None:
    name, *arguments = command_of(unit)
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    parser.parse_args(arguments)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_it(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    copy = tmp_path / unit.name
    # systemd looks whether the program is there; where this clone lies is not what is tested.
    copy.write_text(unit.read_text().replace("/opt/sonar/", f"{ROOT}/"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and unit.name not in done.stderr, done.stderr
