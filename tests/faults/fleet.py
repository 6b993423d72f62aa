"""A small fleet of real hosts for the fault tests: a head and three nodes in network namespaces, two replicas, so that
one node is spare.

Knows which process plays which part, and when the fleet is whole. Does no harm itself: see catalogue.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.security import load_or_create_token
from tests.faults.history import Owner
from tests.integration.hosts import DEADLINE_S, SONAR, Host, Network, Running, in_namespace

HEAD = "10.1.0.1"
MODEL = "tiny"
HEAD_DISK_BYTES = 128 << 20
_METRIC = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")


@dataclass(frozen=True)
class Replica:
    """As the head shows it. node, pid: of its lead; the other ranks follow it in `nodes` and `pids`."""

    replica_id: str
    state: str
    incarnation: int
    nodes: list[str]
    pids: list[int]

    @property
    def node(self) -> str:
        return self.nodes[0]


@dataclass
class Fleet:
    """Owner of the processes.

    Attributes:
        engine: lines of the deployment's engine table, e.g. "tp = 2".
        struck_s: when a fault was last done.
        patches: a folder whose sitecustomize every process of the fleet loads.
    """

    network: Network
    model: str
    token: Path
    patches: str
    num_replicas: int = 2
    engine: str = ""
    head: Host = field(init=False)
    head_process: Running = field(init=False)
    nodes: dict[str, Host] = field(default_factory=dict)
    agents: dict[str, Running] = field(default_factory=dict)
    owners: list[Owner] = field(default_factory=list)
    struck_s: float = 0.0
    url: str = "http://127.0.0.1:2242"

    def start(self, num_nodes: int = 3) -> None:
        """Brings up hosts and processes; returns when every replica serves."""
        load_or_create_token(self.token)
        self.head = self.network.host("head", f"{HEAD}/24")
        mount = ["mount", "-t", "tmpfs", "-o", f"size={HEAD_DISK_BYTES}", "tmpfs", str(self.head.folder)]
        subprocess.run(mount, check=True)
        for number in range(1, num_nodes + 1):
            self.nodes[f"node-{number}"] = self.network.host(f"node-{number}", f"10.1.0.{number + 1}/24")
        self.start_head()
        for name in self.nodes:
            self.join(name)
        self.wait_until_whole()

    def start_head(self) -> None:
        """The head, or the head again."""
        (self.head.folder / "cluster.toml").write_text(self._toml())
        self.head_process = self.head.start(
            *SONAR, "head", "--config", str(self.head.folder / "cluster.toml"), **self._environ()
        )

    def join(self, name: str) -> None:
        """A node's agent, or its agent again."""
        self.agents[name] = self.nodes[name].join(HEAD, self.token, **self._environ())

    def _environ(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{self.patches}:{os.environ.get('PYTHONPATH', '')}"}

    def _toml(self) -> str:
        return f"""
[security]
token_file = "{self.token}"
[nodes]
head_runs_workers = false
min = {len(self.nodes)}
[[deployment]]
name = "{MODEL}"
model = "{self.model}"
replicas = {self.num_replicas}
{self.engine}
[deployment.engine]
device = "cpu"
threads = 1
[deployment.cache]
memory_bytes = "16MiB"
"""

    def get(self, path: str) -> httpx.Response:
        """Asks the head's HTTP API."""
        return in_namespace(
            self.head.namespace, lambda: httpx.get(self.url + path, timeout=DEADLINE_S, trust_env=False)
        )

    def metrics(self) -> dict[str, dict[str, float]]:
        """Name -> labels as written -> value; {} while nobody answers."""
        found: dict[str, dict[str, float]] = {}
        with contextlib.suppress(httpx.TransportError):
            for line in self.get("/metrics").text.splitlines():
                if parts := _METRIC.match(line):
                    found.setdefault(parts[1], {})[parts[2] or ""] = float(parts[3])
        return found

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        return sum(self.metrics().get(name, {}).values())

    def status(self) -> dict[str, Any]:
        """What `sonar status --json` shows; {} while no head answers."""
        shown = self.head.run(*SONAR, "status", "--json", "--head", HEAD, "--token-file", str(self.token))
        return json.loads(shown.stdout) if shown.returncode == 0 else {}

    def replicas(self) -> list[Replica]:
        """All of them; [] while no head answers. What is seen is kept for `history.check_owners`."""
        names = ("replica_id", "state", "incarnation", "nodes", "pids")
        found = [Replica(**{name: each[name] for name in names}) for each in self.status().get("replicas", ())]
        now = time.monotonic()
        self.owners += [Owner(now, r.replica_id, r.incarnation, tuple(r.pids)) for r in found if r.state == "ready"]
        return found

    def busiest(self) -> Replica:
        """The ready replica with the most open requests."""
        open_ = self.metrics()["sonar_replica_open_requests"]
        ready = [replica for replica in self.replicas() if replica.state == "ready"]
        return max(ready, key=lambda r: open_.get(f'replica="{r.replica_id}"', 0.0))

    def num_ready(self) -> int:
        """Replicas that take requests."""
        return len(self.metrics().get("sonar_replica_blocks_total", {}))

    def num_incarnations(self) -> float:
        """Starts of all replicas so far; 0 while no head answers."""
        return self.metric("sonar_replica_incarnation")

    def wait_until_whole(self) -> float:
        """Until every replica serves and every host that runs an agent is up; when the former was."""
        self.wait(lambda: self.num_ready() == self.num_replicas, "every replica serves")
        seen_s = time.monotonic()
        self.wait(
            lambda: (
                self.metrics().get("sonar_nodes", {}).get('state="up"') == len(self.nodes)
                and [r.state for r in self.replicas()] == ["ready"] * self.num_replicas
            ),
            "every host is up",
        )
        return seen_s

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Polls; fails with the head's output."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert self.head_process.process.poll() is None, self.head_process.text()
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}\n{self.head_process.text()}"
            time.sleep(0.1)

    def check_memory(self) -> None:
        """With no request open every KV block is free or cached."""

        def is_free() -> bool:
            figures = self.metrics()
            held = ("sonar_replica_blocks_in_use", "sonar_replica_blocks_in_transit")
            free = ("sonar_replica_blocks_free", "sonar_replica_blocks_cached")
            total = figures.get("sonar_replica_blocks_total", {})
            return (
                len(total) == self.num_replicas
                and not any(value for name in held for value in figures[name].values())
                and all(sum(figures[name][replica] for name in free) == blocks for replica, blocks in total.items())
            )

        self.wait(lambda: self.metric("sonar_open_requests") == 0, "no request is open")
        self.wait(is_free, "every block is free or cached")

    def check_processes(self) -> None:
        """The workers that run are those the head knows: none is missing, none outlived what should have ended it."""

        def is_so() -> bool:
            known: dict[str, set[int]] = {name: set() for name in self.nodes}
            for replica in self.replicas():
                for node, pid in zip(replica.nodes, replica.pids, strict=True):
                    known[node].add(pid)
            return known == {name: set(workers(node)) for name, node in self.nodes.items()}

        self.wait(is_so, "the workers that run are those the head knows")

    def strike(self) -> None:
        """The fault is done now."""
        self.struck_s = time.monotonic()

    def stop(self) -> None:
        """Ends the head in good order; the agents end by the head's word."""
        assert self.head_process.end(signal.SIGTERM) == 0, self.head_process.text()

    def close(self) -> None:
        """Ends what still runs on the head's host, and takes its disk away."""
        self.head.close()
        subprocess.run(["umount", str(self.head.folder)], check=True)


def workers(host: Host) -> list[int]:
    """Processes of ranks in a host's namespace."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(process.cmdline()):
                found.append(pid)
    return found
