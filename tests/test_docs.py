"""What the documentation says is run: every ```bash and ```python block of README.md and docs/, and every example.

The convention: `bash` and `python` blocks work as they stand, in order, from the clone's root, against a demo server
on its standard port (here the port is replaced by the test server's). What needs a fresh machine, a terminal or a long
time is `console` or `text`, and `console` is allowed for nothing else. Links to files must lead somewhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from .demo_server import DemoServer

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PORT = "2242"
LANGUAGES = {"bash", "python", "console", "text", "toml", "json"}
CODE_TIMEOUT_S = 100


class Block(NamedTuple):
    """A fenced block of a page. line: of its first line of content."""

    page: str
    line: int
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks, in order."""
    found, language, begin, lines = [], None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if language is None and line.startswith("```"):
            language, begin, lines = line[3:].strip(), number + 1, []
        elif language is not None and line.rstrip() == "```":
            found.append(Block(page.relative_to(ROOT).as_posix(), begin, language, "\n".join(lines) + "\n"))
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"{page}: a block that begins at line {begin} has no end"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUNNABLE = [block for block in BLOCKS if block.language in ("bash", "python")]


def run_like_a_reader(command: list[str], server: DemoServer) -> subprocess.CompletedProcess[str]:
    """Runs a command in the clone with its environment first on PATH."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **server.environ}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CODE_TIMEOUT_S,
    )


@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: f"{block.page}:{block.line}")
def test_the_block_works_as_it_stands(block: Block, demo_server: DemoServer) -> None:
    text = block.text.replace(PORT, str(demo_server.port))
    command = ["bash", "-euo", "pipefail", "-c", text] if block.language == "bash" else [sys.executable, "-c", text]
    done = run_like_a_reader(command, demo_server)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_blocks_name_a_known_language() -> None:
    assert [f"{b.page}:{b.line} {b.language!r}" for b in BLOCKS if b.language not in LANGUAGES] == []


def test_the_readme_shows_the_two_commands_of_a_fresh_machine() -> None:
    consoles = "".join(block.text for block in blocks_of(ROOT / "README.md") if block.language == "console")
    assert "./launcher/run_cluster.sh demo" in consoles and "./tests/run.sh" in consoles


def test_the_readme_installs_the_client_before_it_uses_it() -> None:
    """The demo's environment has run-time dependencies only; the one of the tests has the client already."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not any(name.startswith("openai") for name in project["dependencies"])
    before, _, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition("from openai import")
    assert "source .venv/bin/activate && python -m pip install openai" in before


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


EXAMPLES = {
    "openai_client.py": [sys.executable, "examples/openai_client.py", "{url}"],
    "offline.py": [sys.executable, "examples/offline.py"],
    "streaming_curl.sh": ["examples/streaming_curl.sh", "{url}"],
    "survive_a_crash.sh": ["examples/survive_a_crash.sh", "{port}"],
}
EXPECTED = {
    "openai_client.py": "completion_tokens=",
    "offline.py": "->",
    "streaming_curl.sh": "data: [DONE]",
    "survive_a_crash.sh": "the same text, token for token",
}


def test_every_example_is_run_here() -> None:
    assert sorted(file.name for file in (ROOT / "examples").iterdir() if file.is_file()) == sorted(EXAMPLES)


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_the_example_works(name: str, demo_server: DemoServer) -> None:
    command = [part.format(url=demo_server.url, port=demo_server.port) for part in EXAMPLES[name]]
    done = run_like_a_reader(command, demo_server)
    assert done.returncode == 0, done.stderr[-2000:]
    assert EXPECTED[name] in done.stdout
