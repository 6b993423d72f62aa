"""Hosts of `sonar up`, and the script that a host's shell runs; tests/integration/test_hosts.py tries the whole."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launcher.cli.up import parse_hosts, remote_script
from sonar.errors import ConfigError
from sonar.transport import Address


def test_a_host_is_named_without_its_user() -> None:
    assert parse_hosts("a, me@b.example,,c") == {"a": "a", "b.example": "me@b.example", "c": "c"}
    for text, words in (("a,me@a", "a twice"), (",", "is empty"), ("a b", "use letters")):
        with pytest.raises(ConfigError, match=words):
            parse_hosts(text)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A run_cluster.sh that says how it was called, then waits to be ended, or ends with the code in `code`."""
    script = tmp_path / "a clone" / "launcher" / "run_cluster.sh"
    script.parent.mkdir(parents=True)
    script.write_text(
        '#!/bin/sh\ntrap "echo left; exit 7" TERM\necho "$@"\n[ -e code ] && exit "$(cat code)"\n'
        "while :; do sleep 0.05; done\n"
    )
    script.chmod(0o700)
    return script.parent.parent


def run_script(clone: Path, state: Path, text: str) -> subprocess.Popen[str]:
    script = remote_script(str(clone), "node-1", Address("fd00::1", 2243))
    process = subprocess.Popen(
        ["sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(state)},
    )
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()
    return process


def test_the_agent_leaves_at_the_end_of_the_input(clone: Path, tmp_path: Path) -> None:
    process = run_script(clone, tmp_path / "state", "the-token\n")
    assert process.stdout is not None
    token = tmp_path / "state/sonar/up-node-1.token"
    assert process.stdout.readline() == f"join [fd00::1]:2243 --node-id node-1 --token-file {token}\n"
    assert token.read_text() == "the-token\n" and token.stat().st_mode & 0o777 == 0o600
    rest, _ = process.communicate(timeout=20)
    assert rest == "left\n" and process.returncode == 7


def test_an_agents_own_end_is_the_hosts(clone: Path, tmp_path: Path) -> None:
    (clone / "code").write_text("3")
    process = run_script(clone, tmp_path / "state", "the-token\n")
    assert process.wait(20) == 3
    process.communicate()


def test_a_missing_clone_is_said(tmp_path: Path) -> None:
    process = run_script(tmp_path / "nowhere", tmp_path / "state", "the-token\n")
    assert process.wait(20) == 2
    process.communicate()
