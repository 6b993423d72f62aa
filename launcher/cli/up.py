"""`sonar up --config cluster.toml --hosts a,b,c`: a head here, and `sonar join` on every host named, over ssh.

Gives each host the join token through ssh's standard input, and shows its output after its name. What was started lives
as long as this process: the hosts' agents see the end of that input and leave. Sonar has to lie on every host already.
Knows no cluster: head and agents are the ordinary commands.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.cluster_file import read_cluster_file
from cluster.config import check_name
from cluster.security import load_or_create_token
from launcher.cli.head import chosen_settings
from launcher.cli.state import StateDir
from sonar.errors import ConfigError
from sonar.transport import Address

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.1
END_TIMEOUT_S = 60.0
SSH_FAILED = 255


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, the hosts, and how to reach them."""
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="cluster.toml, on this host")
    parser.add_argument("--hosts", required=True, metavar="A,B,C", help="[user@]host, as ssh takes them")
    parser.add_argument("--ssh", default="ssh -o BatchMode=yes -o ConnectTimeout=10", help="default: %(default)s")
    parser.add_argument("--remote-dir", default=str(ROOT), metavar="DIR", help="the clone there (default: as here)")
    parser.set_defaults(log_level="info")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Runs until SIGINT, SIGTERM, or the head's end. Returns the head's exit code.

    Raises:
        ConfigError: the file is wrong, or a host is given twice or has a name that no node can have.
    """
    hosts = parse_hosts(args.hosts)
    settings = chosen_settings(read_cluster_file(args.config, StateDir.of_user(environ).server_dir), environ)
    config = settings.config
    head = Address(config.network.control_host, config.network.control_port)
    token = load_or_create_token(config.token_path)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    command = [sys.executable, "-m", "launcher.cli.main", "head", "--config", str(args.config)]
    process = subprocess.Popen(command, start_new_session=True)
    agents = [
        _RemoteAgent.start([*shlex.split(args.ssh), target, remote_script(args.remote_dir, name, head)], name, token)
        for name, target in hosts.items()
    ]
    try:
        while process.poll() is None and not stop.wait(POLL_S):
            for agent in agents:
                agent.tell_end()
    finally:
        _end(process, agents)
    return process.returncode


def parse_hosts(text: str) -> dict[str, str]:
    """Node id -> what ssh is given.

    Raises:
        ConfigError: see `run`.
    """
    hosts: dict[str, str] = {}
    for target in filter(None, (part.strip() for part in text.split(","))):
        name = target.rpartition("@")[2]
        check_name("hosts", name)
        if name in hosts:
            raise ConfigError(f"--hosts names {name} twice", param="hosts")
        hosts[name] = target
    if not hosts:
        raise ConfigError("--hosts is empty; give e.g. --hosts gpu-1,gpu-2", param="hosts")
    return hosts


def remote_script(remote_dir: str, node_id: str, head: Address) -> str:
    """What a host's shell runs. The token is the first line of its input, never an argument; the input's end, which
    comes with the end of this process or of the connection, makes the agent leave."""
    join = shlex.join(["./launcher/run_cluster.sh", "join", str(head), "--node-id", node_id, "--token-file"])
    return f"""\
umask 077
token="${{XDG_STATE_HOME:-$HOME/.local/state}}/sonar/up-{node_id}.token"
mkdir -p "${{token%/*}}" && IFS= read -r line && printf '%s\\n' "$line" >"$token" || exit 2
cd {shlex.quote(remote_dir)} || exit 2
exec 3<&0
{join} "$token" </dev/null 3<&- & agent=$!
{{ cat <&3 >/dev/null; kill -TERM $agent; }} 2>/dev/null & watcher=$!
wait $agent; code=$?
kill $watcher 2>/dev/null
exit $code"""


@dataclass
class _RemoteAgent:
    """An agent behind an ssh process."""

    name: str
    process: subprocess.Popen[str]
    reader: threading.Thread
    was_told: bool = False

    @classmethod
    def start(cls, command: list[str], name: str, token: str) -> _RemoteAgent:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{token}\n")
            process.stdin.flush()
        reader = threading.Thread(target=_show, args=(name, iter(process.stdout)), daemon=True)
        reader.start()
        return cls(name, process, reader)

    def tell_end(self) -> None:
        """Says once that this host is out."""
        code = self.process.poll()
        if code is None or self.was_told:
            return
        self.was_told = True
        why = "ssh could not reach it, log in, or was cut off" if code == SSH_FAILED else "its lines above say why"
        logger.error("host %s has left with exit code %d: %s", self.name, code, why)

    def leave(self) -> None:
        """Closes its input."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def _show(name: str, lines: Iterator[str]) -> None:
    for line in lines:
        print(f"[{name}] {line}", end="", flush=True)


def _end(head: subprocess.Popen[bytes], agents: list[_RemoteAgent]) -> None:
    """The head drains while its hosts are there; then they leave. Whoever takes too long is killed."""
    if head.poll() is None:
        head.terminate()
    deadline_s = time.monotonic() + END_TIMEOUT_S
    _wait(head, deadline_s)
    for agent in agents:
        agent.leave()
    for agent in agents:
        _wait(agent.process, deadline_s)
        agent.reader.join(1.0)


def _wait(process: subprocess.Popen[bytes] | subprocess.Popen[str], deadline_s: float) -> None:
    try:
        process.wait(max(0.1, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
