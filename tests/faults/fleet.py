"""A small fleet of real hosts for the fault tests, in network namespaces: a client, a head or two, three nodes, and
with two heads a host with the three members of etcd.

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

HEADS = {"head": "10.1.0.1", "other-head": "10.1.0.9"}
STORE = "10.1.0.10"
CLIENT = "10.1.0.11"
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
    role: str

    @property
    def node(self) -> str:
        return self.nodes[0]


@dataclass(frozen=True)
class Kind:
    """What a fleet is made of. deployment, engine: lines of those tables of cluster.toml."""

    deployment: str = ""
    engine: str = ""
    num_replicas: int = 2
    num_heads: int = 1


KINDS = {
    "plain": Kind(),
    "tp": Kind("tp = 2"),
    "pp": Kind("pp = 2"),
    "pools": Kind("prefill_replicas = 1", 'kv_transfer = "shm"', num_replicas=3),
    "heads": Kind(num_heads=2),
}


@dataclass
class Fleet:
    """Owner of the processes.

    Attributes:
        patches: a folder whose sitecustomize every process of the fleet loads.
        heads, members: of the control plane and of etcd, by name. struck_s: when a fault was last done.
    """

    network: Network
    model: str
    token: Path
    patches: str
    kind: Kind
    client: Host = field(init=False)
    heads: dict[str, Host] = field(default_factory=dict)
    head_processes: dict[str, Running] = field(default_factory=dict)
    store: Host | None = None
    members: dict[str, Running] = field(default_factory=dict)
    nodes: dict[str, Host] = field(default_factory=dict)
    agents: dict[str, Running] = field(default_factory=dict)
    owners: list[Owner] = field(default_factory=list)
    struck_s: float = 0.0

    @property
    def num_replicas(self) -> int:
        """Of the deployment."""
        return self.kind.num_replicas

    @property
    def urls(self) -> list[str]:
        """Of every head's API."""
        return [f"http://{HEADS[name]}:2242" for name in self.heads]

    def start(self, num_nodes: int = 3) -> None:
        """Brings up hosts and processes; returns when every replica serves."""
        load_or_create_token(self.token)
        self.client = self.network.host("client", f"{CLIENT}/24")
        for name, address in list(HEADS.items())[: self.kind.num_heads]:
            self.heads[name] = self.network.host(name, f"{address}/24")
            self._mount(self.heads[name])
        for number in range(1, num_nodes + 1):
            self.nodes[f"node-{number}"] = self.network.host(f"node-{number}", f"10.1.0.{number + 1}/24")
        if self.kind.num_heads > 1:
            self.store = self.network.host("store", f"{STORE}/24")
            for name in ("m0", "m1", "m2"):
                self.start_member(name)
        for name in self.heads:
            self.start_head(name)
        for name in self.nodes:
            self.join(name)
        self.wait_until_whole()

    def _mount(self, host: Host) -> None:
        """A disk of its own, that can be filled."""
        mount = ["mount", "-t", "tmpfs", "-o", f"size={HEAD_DISK_BYTES}", "tmpfs", str(host.folder)]
        subprocess.run(mount, check=True)

    def start_member(self, name: str) -> None:
        """A member of etcd, or the member again."""
        assert self.store is not None
        number = int(name[1:])
        peers = ",".join(f"m{n}=http://{STORE}:{2480 + n}" for n in range(3))
        client, peer = f"http://{STORE}:{2379 + number}", f"http://{STORE}:{2480 + number}"
        self.members[name] = self.store.start(
            *("etcd", "--name", name, "--data-dir", str(self.store.folder / name), "--unsafe-no-fsync"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", peers),
        )

    def start_head(self, name: str) -> None:
        """A head, or the head again."""
        host = self.heads[name]
        (host.folder / "cluster.toml").write_text(self._toml(HEADS[name]))
        self.head_processes[name] = host.start(
            *SONAR, "head", "--config", str(host.folder / "cluster.toml"), **self._environ()
        )

    def leader(self) -> str:
        """The head that leads."""
        for name in self.heads:
            with contextlib.suppress(httpx.TransportError):
                health = self._get(f"http://{HEADS[name]}:2242/health")
                if health.status_code == 200 and health.json().get("role") != "standby":
                    return name
        raise AssertionError(f"no head leads\n{self.text()}")

    def join(self, name: str) -> None:
        """A node's agent, or its agent again."""
        heads = ",".join(HEADS[head] for head in self.heads)
        self.agents[name] = self.nodes[name].join(heads, self.token, **self._environ())

    def _environ(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{self.patches}:{os.environ.get('PYTHONPATH', '')}"}

    def _toml(self, address: str) -> str:
        endpoints = [f"http://{STORE}:{2379 + number}" for number in range(3)]
        store = f'[store]\nkind = "etcd"\nendpoints = {json.dumps(endpoints)}' if self.store else ""
        return f"""
[http]
host = "{address}"
[security]
token_file = "{self.token}"
[nodes]
head_runs_workers = false
min = {len(self.nodes)}
{store}
[[deployment]]
name = "{MODEL}"
model = "{self.model}"
replicas = {self.num_replicas}
{self.kind.deployment}
[deployment.engine]
device = "cpu"
threads = 1
{self.kind.engine}
[deployment.cache]
memory_bytes = "16MiB"
"""

    def _get(self, url: str) -> httpx.Response:
        return in_namespace(
            self.client.namespace, lambda: httpx.get(url, timeout=httpx.Timeout(20.0, connect=1.0), trust_env=False)
        )

    def get(self, path: str) -> httpx.Response:
        """Asks the first head that answers.

        Raises:
            httpx.TransportError: none does.
        """
        for url in self.urls[:-1]:
            with contextlib.suppress(httpx.TransportError):
                answer = self._get(url + path)
                if answer.status_code == 200:
                    return answer
        return self._get(self.urls[-1] + path)

    def text(self) -> str:
        """What the heads said."""
        return "\n".join(f"--- {name}\n{process.text()}" for name, process in self.head_processes.items())

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
        for name in self.heads:
            where = ("--head", HEADS[name], "--token-file", str(self.token))
            shown = self.client.run(*SONAR, "status", "--json", *where)
            if shown.returncode == 0:
                return json.loads(shown.stdout)
        return {}

    def replicas(self) -> list[Replica]:
        """All of them; [] while no head answers. What is seen is kept for `history.check_owners`."""
        names = ("replica_id", "state", "incarnation", "nodes", "pids", "role")
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
            assert any(head.process.poll() is None for head in self.head_processes.values()), self.text()
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}\n{self.text()}"
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
        """Ends the heads in good order, the one that leads last; the agents end by its word."""
        leader = self.leader()
        for name in sorted(self.heads, key=lambda name: name == leader):
            assert self.head_processes[name].end(signal.SIGTERM) == 0, self.text()

    def close(self) -> None:
        """Ends what still runs on the heads' hosts, and takes their disks away."""
        for host in self.heads.values():
            host.close()
            subprocess.run(["umount", str(host.folder)], check=True)


def workers(host: Host) -> list[int]:
    """Processes of ranks in a host's namespace."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(process.cmdline()):
                found.append(pid)
    return found
