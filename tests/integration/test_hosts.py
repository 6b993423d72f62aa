"""Many hosts: joins in any order, streams that outlive hosts, and every bad host named with its remedy."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shlex
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.security import load_or_create_token
from tests.integration.hosts import (
    COMMAND,
    DEADLINE_S,
    ROOT,
    SONAR,
    Host,
    Network,
    Running,
    Stream,
    in_namespace,
    running_network,
)
from tests.tiny import write_tiny_folder

TOKENS = 1200


def cluster_toml(model: str, token: Path, *, replicas: int = 1, more: str = "", nodes: str = "") -> str:
    """A head that serves one tiny model from other hosts."""
    return f"""
{more}
[security]
token_file = "{token}"
[nodes]
head_runs_workers = false
{nodes}
[[deployment]]
name = "tiny"
model = "{model}"
replicas = {replicas}
[deployment.engine]
device = "cpu"
threads = 1
[deployment.cache]
memory_bytes = "16MiB"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With room for streams that are still under way when a busy machine gets round to killing something."""
    folder = write_tiny_folder("llama", tmp_path_factory.mktemp("model") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return str(folder)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with running_network(tmp_path, "s") as network:
        yield network


@dataclass
class Cluster:
    """A head and three nodes, each node with one replica."""

    head: Host
    head_process: Running
    nodes: dict[str, Host]
    token: Path
    agents: dict[str, Running] = field(default_factory=dict)
    url: str = "http://127.0.0.1:2242"

    def join(self, name: str) -> None:
        self.agents[name] = self.nodes[name].join("10.1.0.1", self.token)

    def get(self, path: str) -> httpx.Response:
        ask = lambda: httpx.get(self.url + path, timeout=DEADLINE_S, trust_env=False)  # noqa: E731
        return in_namespace(self.head.namespace, ask)

    def num_ready(self) -> int:
        """Replicas that take requests."""
        lines = self.get("/metrics").text.splitlines()
        return sum(line.startswith("sonar_replica_blocks_total{") for line in lines)

    def num_migrations(self) -> float:
        """Attempts that broke off and were begun again."""
        lines = self.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("sonar_migrations_total ")).split()[1])

    def wait_for_replicas(self, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.num_ready() != count:
            assert time.monotonic() < deadline, self.head_process.text()
            time.sleep(0.1)

    def wait_until_status(self, pattern: str) -> None:
        """Waits until `sonar status` shows it."""
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(pattern, text := self.head.run(*SONAR, "status").stdout):
            assert time.monotonic() < deadline, text
            time.sleep(0.2)

    def streams(self, count: int = 6) -> list[Stream]:
        return [Stream(self.head, self.url, f"stream {number}", TOKENS) for number in range(count)]


@pytest.fixture(scope="module")
def cluster(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Agents come in any order, some before the head."""
    folder = tmp_path_factory.mktemp("hosts")
    with running_network(folder, "m") as network:
        head = network.host("head", "10.1.0.1/24")
        nodes = {f"node-{n}": network.host(f"node-{n}", f"10.1.0.{n + 1}/24") for n in range(1, 4)}
        token = folder / "join.token"
        load_or_create_token(token)
        order = random.sample(sorted(nodes), 3)
        print("order", order)
        agents = {order[0]: nodes[order[0]].join("10.1.0.1", token)}
        process = head.head(cluster_toml(model, token, replicas=3, nodes="min = 3"))
        for name in order[1:]:
            agents[name] = nodes[name].join("10.1.0.1:2243", token)
        cluster = Cluster(head, process, nodes, token, agents)
        process.wait_for("Ready after")
        yield cluster
        print(process.text())
        assert process.end() == 0


@pytest.fixture(scope="module")
def unbroken(cluster: Cluster) -> list[str]:
    """What the streams are when nothing happens."""
    return [stream.end() for stream in cluster.streams()]


def check(streams: list[Stream], unbroken: list[str]) -> None:
    assert [stream.end() for stream in streams] == unbroken
    assert {stream.num_tokens for stream in streams} == {TOKENS}


def workers(agent: Running) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(agent.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one
            if "spawn_main" in " ".join(process.cmdline()):
                found.append(process)
    return found


def interrupt(cluster: Cluster, unbroken: list[str], act: Callable[[], object], mend: Callable[[], object]) -> None:
    """Does something to a host while it computes streams, each of which ends as if nothing had happened. On a busy
    machine all of that host's may be computed before it happens: then once more."""
    for _ in range(5):
        cluster.wait_for_replicas(3)
        before = cluster.num_migrations()
        streams = cluster.streams()
        for stream in streams:
            stream.has_begun()
        act()
        check(streams, unbroken)
        if cluster.num_migrations() > before:
            return
        mend()
    raise AssertionError("never was a stream under way there")


def test_each_node_has_a_replica_and_says_its_address(cluster: Cluster, unbroken: list[str]) -> None:
    assert re.search(r"Ready after .* 3 replicas on node-1, node-2, node-3", cluster.head_process.text())
    for number, (_, agent) in enumerate(sorted(cluster.agents.items()), 1):
        assert f"by 10.1.0.{number + 1} on eth0" in agent.text()
        assert len(workers(agent)) == 1
    assert len(set(unbroken)) == len(unbroken)


def test_sigkill_of_a_lead_is_a_pause(cluster: Cluster, unbroken: list[str]) -> None:
    def kill_lead() -> None:
        next(found[0] for agent in cluster.agents.values() if (found := workers(agent))).kill()

    interrupt(cluster, unbroken, kill_lead, lambda: None)
    assert "SIGKILL" in cluster.head_process.text()
    cluster.wait_for_replicas(3)


def test_sigkill_of_an_agent_is_a_pause_and_its_host_may_come_back(cluster: Cluster, unbroken: list[str]) -> None:
    killed: list[str] = []

    def kill_agent() -> None:
        # A host that came back may have no worker: its replica has moved.
        name = next(name for name, agent in cluster.agents.items() if workers(agent))
        lead = workers(cluster.agents[name])[0]
        assert cluster.agents[name].end(signal.SIGKILL) == -signal.SIGKILL
        killed.append(name)
        psutil.wait_procs([lead], 10)
        assert not lead.is_running(), "a worker outlived its agent"

    interrupt(cluster, unbroken, kill_agent, lambda: cluster.join(killed[-1]))
    assert f"node {killed[-1]} is lost: silent" in cluster.head_process.text()
    cluster.join(killed[-1])
    cluster.wait_for_replicas(3)


def test_a_cut_link_is_a_pause_and_mends(cluster: Cluster, unbroken: list[str]) -> None:
    """No process dies and no connection is reset: the host is just not heard any more. What it computes meanwhile is
    stale, and when it is heard again its worker is replaced."""
    cut: list[tuple[str, psutil.Process]] = []

    def cut_link() -> None:
        name = next(name for name, agent in cluster.agents.items() if workers(agent))
        cut.append((name, workers(cluster.agents[name])[0]))
        cluster.nodes[name].run("ip", "link", "set", "eth0", "down")

    def mend() -> None:
        cluster.nodes[cut[-1][0]].run("ip", "link", "set", "eth0", "up")

    interrupt(cluster, unbroken, cut_link, mend)
    name, stale = cut[-1]
    assert f"node {name} is lost: silent" in cluster.head_process.text()
    mend()
    psutil.wait_procs([stale], DEADLINE_S)
    assert not stale.is_running() and cluster.agents[name].process.poll() is None
    cluster.wait_for_replicas(3)


def test_a_host_that_leaves_drains_first(cluster: Cluster, unbroken: list[str]) -> None:
    streams = cluster.streams()
    for stream in streams:
        stream.has_begun()
    assert cluster.agents["node-3"].end() == 0
    check(streams, unbroken)
    assert "node node-3 is leaving" in cluster.head_process.text()
    assert "its agent left: SIGTERM" in cluster.head_process.text()
    cluster.wait_for_replicas(3)
    cluster.join("node-3")
    cluster.agents["node-3"].wait_for("joins")


def test_operators_see_and_move_everything(cluster: Cluster, unbroken: list[str]) -> None:
    cluster.wait_for_replicas(3)
    head, far = cluster.head, cluster.nodes["node-2"]
    shown = head.run(*SONAR, "status")
    assert shown.returncode == 0, shown.stderr
    for name in cluster.nodes:
        assert re.search(rf"{name} +up +10\.1\.0\.\d eth0 ", shown.stdout), shown.stdout
    assert len(re.findall(r"tiny-\d +ready ", shown.stdout)) == 3
    remote = ("--head", "10.1.0.1", "--token-file", str(far.copy_of(cluster.token)))
    streams = cluster.streams()
    for stream in streams:
        stream.has_begun()
    drained = far.run(*SONAR, "drain", "node-1", *remote)
    assert drained.returncode == 0 and "node-1 takes no new work" in drained.stdout, drained.stderr
    check(streams, unbroken)
    cluster.wait_until_status(r"node-1 +drained (.|\n)*tiny-0 +ready(.|\n)*tiny-1 +ready(.|\n)*tiny-2 +ready")
    assert workers(cluster.agents["node-1"]) == []
    assert head.run(*SONAR, "drain", "node-1", "--undo").stdout == "node-1 takes work again\n"
    assert "tiny: 3 -> 2 replicas" in head.run(*SONAR, "scale", "tiny", "2").stdout
    cluster.wait_for_replicas(2)
    assert "tiny: 2 -> 3 replicas" in far.run(*SONAR, "scale", "tiny", "3", *remote).stdout
    cluster.wait_for_replicas(3)
    wrong = head.run(*SONAR, "drain", "node-7")
    assert wrong.returncode == 2 and "no node 'node-7'; did you mean node-" in wrong.stderr


def test_a_rolling_restart_breaks_no_stream(cluster: Cluster, unbroken: list[str]) -> None:
    cluster.wait_for_replicas(3)
    before = {p.pid for agent in cluster.agents.values() for p in workers(agent)}
    streams = cluster.streams()
    for stream in streams:
        stream.has_begun()
    asked = cluster.head.run(*SONAR, "restart", "tiny")
    assert asked.returncode == 0 and "starts anew while the others serve" in asked.stdout, asked.stderr
    check(streams, unbroken)
    deadline = time.monotonic() + DEADLINE_S
    while before & {p.pid for agent in cluster.agents.values() for p in workers(agent)}:
        assert cluster.num_ready() >= 2, "two of three serve at any time"
        assert time.monotonic() < deadline, cluster.head_process.text()
        time.sleep(0.1)
    cluster.wait_for_replicas(3)


def test_a_stranger_is_no_operator(cluster: Cluster, tmp_path: Path) -> None:
    token = tmp_path / "join.token"
    load_or_create_token(token)
    far = cluster.nodes["node-2"]
    cluster.wait_for_replicas(3)
    refused = far.run(*SONAR, "scale", "tiny", "0", "--head", "10.1.0.1", "--token-file", str(token))
    assert refused.returncode == 1 and "the join token is not the one of that head" in refused.stderr
    assert cluster.num_ready() == 3


def test_check_and_plan_see_the_running_cluster(cluster: Cluster) -> None:
    sound = cluster.head.run(*SONAR, "check")
    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "cluster: 3 nodes, 6 directed pairs reach each other" in sound.stdout
    node = cluster.nodes["node-1"]
    remote = ("--head", "10.1.0.1", "--token-file", str(node.copy_of(cluster.token)))
    node.run("ip", "route", "add", "blackhole", "10.1.0.3/32")
    bad = node.run(*SONAR, "check", *remote)
    node.run("ip", "route", "del", "blackhole", "10.1.0.3/32")
    assert bad.returncode == 1
    assert "to 10.1.0.1:2243 by 10.1.0.2 on eth0, MTU 1500" in bad.stdout
    assert "FAIL  node node-1: cannot reach node-2 at 10.1.0.3; open TCP between the two hosts" in bad.stdout
    plan = cluster.head.run(*SONAR, "plan", str(cluster.head.folder / "cluster.toml"))
    assert plan.returncode == 0, plan.stdout + plan.stderr
    for number in range(1, 4):
        assert re.search(rf"tiny-\d +0 +node-{number} +cpu +eth0 10.1.0.{number + 1} ", plan.stdout), plan.stdout


def test_a_host_that_differs_is_named_when_it_joins(network: Network, model: str, tmp_path: Path) -> None:
    token = tmp_path / "join.token"
    head, node = network.host("head", "10.1.0.1/24"), network.host("node", "10.1.0.2/24")
    process = head.head(cluster_toml(model, token))
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 60\n")
    node.join("10.1.0.1", token, PYTHONPATH=f"{patch}:{ROOT}")
    process.wait_for("preflight: node: its clock is 60.0 s ahead of the head's; run a time service")


def test_ipv6_alone(network: Network, model: str, tmp_path: Path) -> None:
    token = tmp_path / "join.token"
    head, node = network.host("head", "fd00:1::1/64"), network.host("node", "fd00:1::2/64")
    process = head.head(cluster_toml(model, token, more='[http]\nhost = "::"'))
    assert "sonar join [fd00:1::1]:2243 --token-file FILE" in process.text()
    agent = node.join("[fd00:1::1]:2243", token)
    process.wait_for("Ready after")
    assert "by fd00:1::2 on eth0" in agent.text()
    stream = Stream(node, "http://[fd00:1::1]:2242", "hello", 5)
    stream.end()
    assert stream.num_tokens == 5
    assert process.end() == 0


def test_the_right_one_of_two_interfaces(network: Network, model: str, tmp_path: Path) -> None:
    """eth0 is first, has the default route, and does not lead to the head."""
    token = tmp_path / "join.token"
    head = network.host("head", "10.9.0.1/24", "10.1.0.1/24")
    node = network.host("node", "10.8.0.2/24", "10.1.0.2/24")
    node.run("ip", "route", "add", "default", "dev", "eth0")
    toml = cluster_toml(model, token)
    refused = head.start_head(toml)
    assert refused.process.wait(DEADLINE_S) == 2
    assert "several addresses and no default route: eth0=10.9.0.1, eth1=10.1.0.1" in refused.text()
    process = head.head(cluster_toml(model, token, more='[network]\nhost = "10.1.0.1"'))
    assert node.join("10.1.0.1", token).wait_for("by 10.1.0.2 on eth1") is None
    process.wait_for("Ready after")
    far = network.host("far", "10.7.0.2/24").join("10.1.0.1", token)
    assert far.process.wait(DEADLINE_S) == 2
    assert "no route from this host to 10.1.0.1:2243" in far.text() and "eth0=10.7.0.2" in far.text()


def test_bad_hosts_are_named(network: Network, model: str, tmp_path: Path) -> None:
    token, wrong = tmp_path / "join.token", tmp_path / "other" / "join.token"
    load_or_create_token(wrong)
    head, node = network.host("head", "10.1.0.1/24"), network.host("node", "10.1.0.2/24")
    early = node.start(*COMMAND, "join", "10.1.0.1", "--token-file", str(wrong), "--connect-timeout-s", "0.5")
    assert early.process.wait(DEADLINE_S) == 1
    assert "no head answered at 10.1.0.1:2243 within 0.5 s" in early.text()

    process = head.head(cluster_toml(model, token))
    stranger = node.join("10.1.0.1", wrong)
    assert stranger.process.wait(DEADLINE_S) == 1
    assert "the join token is not the one of that head" in stranger.text()
    no_head = node.join("10.1.0.1:2242", token, "--connect-timeout-s", "3")
    assert no_head.process.wait(DEADLINE_S) == 1 and "no head answered" in no_head.text()
    nameless = node.join("no-such-name", token)
    assert nameless.process.wait(DEADLINE_S) == 2 and "the name 'no-such-name' means nothing" in nameless.text()

    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text("import sonar\nsonar.__version__ = '9.9'\n")
    older = node.join("10.1.0.1", token, PYTHONPATH=f"{patch}:{ROOT}")
    assert older.process.wait(DEADLINE_S) == 3
    assert "the head refused this node: Sonar 9.9 there" in older.text()
    process.wait_for("refused node node: Sonar 9.9 there")


def test_a_new_head_finds_its_hosts_again(network: Network, model: str, tmp_path: Path) -> None:
    token = tmp_path / "join.token"
    head, node = network.host("head", "10.1.0.1/24"), network.host("node", "10.1.0.2/24")
    toml = cluster_toml(model, token)
    first = head.head(toml)
    node.join("10.1.0.1", token)
    first.wait_for("Ready after")
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    second = head.head(toml)
    second.wait_for("Ready after")
    assert "1 replicas on node" in second.text()


def test_up_starts_and_ends_every_host(network: Network, model: str, tmp_path: Path) -> None:
    """With a program in ssh's place that enters a host's namespace; one host cannot be reached."""
    head = network.host("head", "10.1.0.1/24")
    nodes = [network.host(f"node-{n}", f"10.1.0.{n + 1}/24") for n in (1, 2)]
    ssh = tmp_path / "ssh"
    cases = "".join(
        f'{n.name}) XDG_STATE_HOME={n.folder}/state exec ip netns exec {n.namespace} sh -c "$2" ;;\n' for n in nodes
    )
    ssh.write_text(f"#!/bin/sh\ncase ${{1#me@}} in\n{cases}esac\nexit 255\n")
    ssh.chmod(0o700)
    clone = tmp_path / "clone" / "launcher"
    clone.mkdir(parents=True)
    (clone / "run_cluster.sh").write_text(f'#!/bin/sh\ncd {ROOT} && exec {shlex.join(COMMAND)} "$@"\n')
    (clone / "run_cluster.sh").chmod(0o700)
    token = tmp_path / "join.token"
    (head.folder / "cluster.toml").write_text(cluster_toml(model, token, replicas=2, nodes="min = 2"))
    hosts = ("--hosts", "me@node-1,node-2,gone", "--ssh", str(ssh), "--remote-dir", str(clone.parent))
    up = head.start(*SONAR, "up", "--config", str(head.folder / "cluster.toml"), *hosts)
    up.wait_for("2 replicas on node-1, node-2")
    assert "host gone has left with exit code 255: ssh could not reach it" in up.text()
    assert "[node-1]" in up.text() and load_or_create_token(token) not in up.text()
    assert up.end() == 0
    assert [node.pids() for node in nodes] == [[], []]


def test_https(network: Network, model: str, tmp_path: Path) -> None:
    head, node = network.host("head", "10.1.0.1/24"), network.host("node", "10.1.0.2/24")
    certificate, key, other = (tmp_path / name for name in ("chain.pem", "key.pem", "other.pem"))
    make = [
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=head",
        "-addext",
        "subjectAltName=IP:10.1.0.1",
    ]
    made = head.run("openssl", *make, "-keyout", str(key), "-out", str(certificate))
    assert made.returncode == 0, made.stderr
    head.run("openssl", "genrsa", "-out", str(other), "2048")
    http = f'[http]\nhost = "10.1.0.1"\ncertificate = "{certificate}"\nprivate_key = '
    refused = head.start_head(cluster_toml(model, tmp_path / "join.token", more=f'{http}"{other}"'))
    assert refused.process.wait(DEADLINE_S) == 2 and "give PEM files that belong together" in refused.text()
    process = head.head(cluster_toml(model, tmp_path / "join.token", more=f'{http}"{key}"'))
    assert "HTTP on https://10.1.0.1:2242" in process.text()
    context = ssl.create_default_context(cafile=str(certificate))
    answer = in_namespace(
        node.namespace, lambda: httpx.get("https://10.1.0.1:2242/health", verify=context, trust_env=False)
    )
    assert answer.status_code == 200
    shown = head.run(*SONAR, "status")
    assert "https://10.1.0.1:2242" in shown.stdout and "starting" in shown.stdout


def test_ports_in_use_are_named(network: Network, model: str, tmp_path: Path) -> None:
    head = network.host("head", "10.1.0.1/24")
    for host, port, name in (("127.0.0.1", 2242, "http_port"), ("10.1.0.1", 2243, "control port")):
        code = (
            f"import socket, time; s = socket.create_server(('{host}', {port})); print('here', flush=1); time.sleep(99)"
        )
        user = head.start(SONAR[0], "-c", code)
        user.wait_for("here")
        refused = head.start_head(cluster_toml(model, tmp_path / "join.token"))
        assert refused.process.wait(DEADLINE_S) == 2
        assert name in refused.text() and str(port) in refused.text() and "stop what listens there" in refused.text()
        user.end()


def test_a_host_that_never_comes_is_named(network: Network, model: str, tmp_path: Path) -> None:
    token = tmp_path / "join.token"
    head, node = network.host("head", "10.1.0.1/24"), network.host("node-1", "10.1.0.2/24")
    nodes = 'expected = ["node-1", "node-2"]\njoin_timeout_s = 4\n'
    process = head.head(cluster_toml(model, token, nodes=nodes + "exit_when_missing = true"))
    node.join("10.1.0.1", token).wait_for("joins")
    assert process.process.wait(DEADLINE_S) == 1
    assert "missing node-2; here: node-1" in process.text()
