"""Several hosts on one machine: network namespaces joined by a bridge, each with the real `sonar` command in it.

Needs root (`ip netns`); `network` skips with the reason where that is refused. Whatever was started in a namespace is
ended with it, and a process that outlives what should have ended it fails the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

R = TypeVar("R")

ROOT = Path(__file__).resolve().parents[2]
SONAR = [sys.executable, "-m", "launcher.cli.main"]
# A clone that is set up has the script that users run; elsewhere it is the module that the script ends in.
COMMAND = [str(ROOT / "launcher/run_cluster.sh")] if (ROOT / ".venv/bin/sonar").exists() else SONAR
DEADLINE_S = 90.0
CLONE_NEWNET = 0x40000000


def ip(*words: str) -> str:
    """Runs iproute2; its output."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def in_namespace(namespace: str, work: Callable[[], R]) -> R:
    """Runs work in a thread whose sockets belong to that namespace."""
    result: list[R] = []
    errors: list[BaseException] = []

    def enter_and_work() -> None:
        try:
            enter(namespace)
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - carried to the caller
            errors.append(error)

    thread = threading.Thread(target=enter_and_work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


def enter(namespace: str) -> None:
    """This thread's new sockets belong to that namespace from here on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


@dataclass
class Running:
    """A process of a host. log: its output."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        """Waits until its output holds these words."""
        deadline = time.monotonic() + DEADLINE_S
        while words not in self.text():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"never said {words!r}:\n{self.text()}"
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits; the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


@dataclass
class Host:
    """One namespace. folder: its own state, logs and files."""

    namespace: str
    name: str
    folder: Path
    running: list[Running] = field(default_factory=list)

    def _environ(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), "SONAR_SETUP": "never"}

    def start(self, *command: str, **environ: str) -> Running:
        """Starts a program here."""
        log = self.folder / f"output-{len(self.running)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command],
                cwd=ROOT,
                env={**self._environ(), **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.running.append(Running(process, log))
        return self.running[-1]

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs a program here to its end."""
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command],
            cwd=ROOT,
            env={**self._environ(), **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def head(self, cluster_toml: str) -> Running:
        """Starts a head and waits until it listens."""
        running = self.start_head(cluster_toml)
        running.wait_for("sonar join")
        return running

    def start_head(self, cluster_toml: str) -> Running:
        """Starts a head."""
        file = self.folder / "cluster.toml"
        file.write_text(cluster_toml)
        return self.start(*COMMAND, "head", "--config", str(file))

    def join(self, head: str, token: Path, *flags: str, **environ: str) -> Running:
        """Starts an agent under this host's name, with a copy of the token."""
        return self.start(
            *COMMAND,
            *("join", head, "--token-file", str(self.copy_of(token)), "--node-id", self.name),
            *flags,
            **environ,
        )

    def copy_of(self, token: Path) -> Path:
        """What an operator does: the token's file, on this host."""
        copy = self.folder / "join.token"
        if token != copy:
            shutil.copy(token, copy)
        return copy

    def pids(self) -> list[int]:
        """Every process of the namespace."""
        return [int(word) for word in ip("netns", "pids", self.namespace).split()]

    def close(self) -> list[int]:
        """Ends what was started here; returns what was left although its parent had ended."""
        for running in self.running:
            if running.process.poll() is None:
                running.process.terminate()
        for running in self.running:
            try:
                running.process.wait(20)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
        deadline = time.monotonic() + 5
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


class Network:
    """Owner of the bridge, in the namespace `switch`, and of the hosts."""

    def __init__(self, folder: Path, label: str) -> None:
        self._folder = folder
        self._label = label
        self.switch = f"{label}sw"
        self.hosts: list[Host] = []
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")

    def host(self, name: str, *addresses: str) -> Host:
        """One more host; interface number n (eth0, eth1, ...) gets the n-th address, e.g. "10.1.0.2/24"."""
        namespace = f"{self._label}{len(self.hosts)}"
        folder = self._folder / name
        folder.mkdir()
        ip("netns", "add", namespace)
        self.hosts.append(Host(namespace, name, folder))
        ip("-n", namespace, "link", "set", "lo", "up")
        for number, address in enumerate(addresses):
            port = self.port_of(self.hosts[-1], number)
            ip(*f"-n {namespace} link add eth{number} type veth peer name {port} netns {self.switch}".split())
            ip(*f"-n {self.switch} link set {port} master bridge up".split())
            ip(*f"-n {namespace} link set eth{number} up".split())
            no_dad = ["nodad"] if ":" in address else []
            ip("-n", namespace, "address", "add", address, "dev", f"eth{number}", *no_dad)
        return self.hosts[-1]

    def port_of(self, host: Host, number: int = 0) -> str:
        """The bridge's end of a host's interface."""
        return f"p{self.hosts.index(host) + 1}x{number}"

    def close(self) -> None:
        """Ends every process and removes the namespaces. Fails if a process was left behind."""
        left = {host.name: pids for host in self.hosts if (pids := host.close())}
        for namespace in [*(host.namespace for host in self.hosts), self.switch]:
            with contextlib.suppress(RuntimeError):
                ip("netns", "del", namespace)
        assert not left, f"processes without their parents: {left}"


@functools.cache
def missing_right() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if shutil.which("ip") is None:
        return "needs ip (Debian's iproute2)"
    name = f"sonarprobe{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "bridge", "type", "bridge")
    except RuntimeError as error:
        return f"network namespaces are refused here: {error}"
    finally:
        with contextlib.suppress(RuntimeError):
            ip("netns", "del", name)
    return ""


@contextlib.contextmanager
def running_network(folder: Path, label: str) -> Iterator[Network]:
    """A network that is gone afterwards. label: tells namespaces of tests that run at the same time apart."""
    if reason := missing_right():
        pytest.skip(reason)
    network = Network(folder, f"sn{os.getpid()}{label}")
    try:
        yield network
    finally:
        network.close()


class Stream:
    """One streamed completion, read in a thread of the head's namespace."""

    def __init__(self, host: Host, url: str, prompt: str, max_tokens: int, model: str = "tiny") -> None:
        self.text = ""
        self.error = ""
        self.num_chunks = 0
        self._namespace = host.namespace
        self._url = f"{url}/v1/completions"
        self._body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.9,
            "seed": 7,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.num_tokens = 0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            enter(self._namespace)
            with httpx.stream("POST", self._url, json=self._body, timeout=DEADLINE_S, trust_env=False) as answer:
                if answer.status_code != 200:
                    self.error = answer.read().decode()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
        except Exception as error:  # noqa: BLE001 - shown by the test
            self.error = repr(error)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event)
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.num_chunks += 1
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]

    def has_begun(self) -> None:
        """Waits until some of it is there."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.num_chunks:
            assert not self.error and self._thread.is_alive() and time.monotonic() < deadline, (self.error, self.text)
            time.sleep(0.005)

    def end(self) -> str:
        """Waits for its end; the whole text."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive() and not self.error, (self.error, self.text)
        return self.text
