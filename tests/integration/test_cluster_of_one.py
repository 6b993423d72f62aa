"""Real processes, a fake engine: streams outlive the processes that compute them, and nothing outlives its head."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from cluster.config import ClusterConfig, NetworkConfig, RestartPolicy, Timeouts
from cluster.gateway import GenerateRequest
from cluster.head import Head
from cluster.messages import AgentToHead
from cluster.records import NodeState, ReplicaState
from launcher.agent import main as agent_main
from sonar.errors import ConfigError
from sonar.messages import FinishReason, LeadToHead, Tokens
from sonar.sampling_params import SamplingParams
from sonar.transport import Address, DropReason, HandshakeRefusedError, PeerId, PeerKind
from sonar.transport_client import Client as TransportClient
from tests.fakes import BAD, POISON, fake_output
from tests.integration.cluster_of_one import Client, alive, family, kill, ready, running_head, until, worker_pid
from tests.integration.head_main import plain_app


async def test_streams_side_by_side_and_bad_requests_alone(tmp_path) -> None:
    async with running_head(tmp_path) as head:
        early = Client(head, "early", [1], 5)  # before any replica: it waits
        clients = [Client(head, f"r{n}", [n + 1, 2], 20 + n, seed=n) for n in range(6)]
        bad = Client(head, "bad", [BAD], 5)
        assert (await bad.end()).error == "prompt: token 667 is not served here"
        for n, client in enumerate(clients):
            assert (await client.end()).finish is FinishReason.LENGTH
            assert client.tokens == fake_output([n + 1, 2], n, 20 + n)
        await early.end()
        assert early.tokens == fake_output([1], 3, 5)
        assert await head.services.gateway.probe("fake", 5.0)
        await until(lambda: not head.control.table.routes()[0].attempts, "the replica is idle")
        aborted = Client(head, "gone", [1], 10_000)
        await aborted.has(3)
        await aborted.close()
        await until(lambda: not head.control.table.routes()[0].attempts, "the replica has dropped it")
        status = head.control.status()
        assert status.replicas[0].state == "ready" and status.nodes[0].state == "up"
        text = "".join(str(sample) for family in head.services.registry.collect() for sample in family.samples)
        assert "sonar_replica_blocks_total" in text and "sonar_requests_total" in text


async def test_sigkill_of_the_lead_is_a_pause(tmp_path) -> None:
    async with running_head(tmp_path, "fake step_ms=10") as head:
        await ready(head)
        clients = [Client(head, f"r{n}", [n + 1], 60) for n in range(3)]
        for client in clients:
            await client.has(10)
        kill(worker_pid(head))
        for n, client in enumerate(clients):
            await client.end()
            assert client.tokens == fake_output([n + 1], 3, 60)
        assert head.control.state.replicas["fake-0"].incarnation == 2
        assert "SIGKILL" in head.control.state.replicas["fake-0"].failure.reason
        assert len(head.control.table.counters.pauses_s) == 3
        print("pauses", head.control.table.counters.pauses_s)


async def test_with_a_second_replica_the_pause_is_short(tmp_path) -> None:
    async with running_head(tmp_path, "fake step_ms=10", replicas=2) as head:
        await ready(head, 2)
        clients = [Client(head, f"r{n}", [n + 1], 80) for n in range(4)]
        for client in clients:
            await client.has(5)
        assert all(route.attempts for route in head.control.table.routes())
        kill(worker_pid(head))
        for n, client in enumerate(clients):
            await client.end()
            assert client.tokens == fake_output([n + 1], 3, 80)
        print("pauses", head.control.table.counters.pauses_s)
        await ready(head, 2)


async def test_sigkill_of_the_agent_leaves_no_orphan_and_heals(tmp_path) -> None:
    async with running_head(tmp_path, "fake step_ms=10 child=1") as head:
        await ready(head)
        client = Client(head, "r", [1], 100)
        await client.has(10)
        agent = head.agent.pid
        old = [psutil.Process(agent), *family(agent)]
        assert len(old) >= 3, "agent, worker, the worker's own child"
        kill(agent)
        await until(lambda: not alive(old), "the agent's processes have ended, the worker's own child too")
        await client.end()
        assert client.tokens == fake_output([1], 3, 100)
        assert head.agent.pid != agent
        log = (tmp_path / "agent/logs/agent.log").read_text()
        assert "killed processes that an earlier agent left behind" in log


async def test_sigterm_of_the_lead_drains_and_replaces_it(tmp_path) -> None:
    async with running_head(tmp_path, "fake step_ms=10", replicas=2) as head:
        await ready(head, 2)
        clients = [Client(head, f"r{n}", [n + 1], 60) for n in range(4)]
        for client in clients:
            await client.has(5)
        kill(worker_pid(head), signal.SIGTERM)
        for n, client in enumerate(clients):
            await client.end()
            assert client.tokens == fake_output([n + 1], 3, 60)
        assert head.control.table.counters.migrations == 0, "they finished where they were"
        await ready(head, 2)
        assert head.control.state.replicas["fake-0"].failure.count == 0


async def test_a_hung_engine_is_found_and_its_stack_is_in_the_log(tmp_path) -> None:
    timeouts = Timeouts(drain_s=5.0, hang_s=2.5)
    async with running_head(tmp_path, "fake step_ms=10 hang_at=12", timeouts=timeouts) as head:
        client = Client(head, "r", [1], 16)
        await client.end()
        assert client.tokens == fake_output([1], 3, 16)
        text = (tmp_path / "agent/logs/fake-0.0.log").read_text()
        assert "tests/fakes.py" in text and "in step" in text
        assert "no sign of life" in head.control.state.replicas["fake-0"].failure.reason


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_stopped_lead_is_found_and_its_streams_are_finished(tmp_path, replicas: int) -> None:
    timeouts = Timeouts(drain_s=5.0, hang_s=3.0)
    async with running_head(tmp_path, "fake step_ms=10", replicas=replicas, timeouts=timeouts) as head:
        await ready(head, replicas)
        clients = [Client(head, f"r{n}", [n + 1], 400) for n in range(2 * replicas)]
        for client in clients:
            await client.has(130)  # long enough for news after the first steps, whose time nobody knew
        stopped = worker_pid(head)
        kill(stopped, signal.SIGSTOP)
        began_s = time.monotonic()
        replica = head.control.state.replicas["fake-0"]
        await until(lambda: replica.failure.reason, "it is found")
        print(f"found after {time.monotonic() - began_s:.1f} s", end=", ")
        for n, client in enumerate(clients):
            assert (await client.end()).finish is FinishReason.LENGTH
            assert client.tokens == fake_output([n + 1], 3, 400)
        print(f"streams finished after {time.monotonic() - began_s:.1f} s")
        assert "no sign of life" in replica.failure.reason
        await ready(head, replicas)
        assert replica.incarnation == 2 and not psutil.pid_exists(stopped)


async def test_a_poison_request_fails_alone(tmp_path) -> None:
    async with running_head(tmp_path, "fake step_ms=10") as head:
        await ready(head)
        good = Client(head, "good", [1], 120)
        await good.has(20)
        poison = Client(head, "poison", [POISON], 50)
        event = await poison.end()
        assert event.finish is FinishReason.ERROR and "died computing this request" in event.error
        assert poison.tokens == fake_output([POISON], 3, 3)
        assert (await good.end()).finish is FinishReason.LENGTH
        assert good.tokens == fake_output([1], 3, 120)
        assert "ArithmeticError: poisoned" in head.control.state.replicas["fake-0"].failure.reason


async def test_a_crash_loop_ends_in_failed_with_the_log_and_the_signal(tmp_path) -> None:
    restart = RestartPolicy(backoff_s=0.1, crash_limit=3)
    async with running_head(tmp_path, "fake fail=crash load_steps=0", restart=restart) as head:
        waiting = Client(head, "r", [1], 5)
        replica = head.control.state.replicas
        await until(lambda: replica["fake-0"].state is ReplicaState.FAILED, "it gives up")
        failure = replica["fake-0"].failure
        assert failure.count == 3 and "SIGSEGV" in failure.reason
        assert "last words before the crash" in failure.log_tail and "Fatal Python error" in failure.log_tail
        event = await waiting.end()
        assert event.finish is FinishReason.ERROR and "can be started" in event.error


async def test_a_start_that_crashes_once_is_tried_again(tmp_path) -> None:
    async with running_head(tmp_path, "fake crash_until=2") as head:
        client = Client(head, "r", [1], 5)
        await client.end()
        assert client.tokens == fake_output([1], 3, 5)


async def test_incarnations_go_on_after_a_restart_of_the_head(tmp_path) -> None:
    last = 0
    for _ in range(3):
        async with running_head(tmp_path) as head:
            await ready(head)
            assert head.control.state.replicas["fake-0"].incarnation > last
            last = head.control.state.replicas["fake-0"].incarnation


async def test_strangers_and_stale_leads_change_nothing(tmp_path) -> None:
    async with running_head(tmp_path) as head:
        await ready(head)
        token = (tmp_path / "join.token").read_text().strip()
        stranger = TransportClient(head.control_address, "wrong", PeerId(PeerKind.AGENT, "x", 1), AgentToHead)
        with pytest.raises(HandshakeRefusedError):
            await asyncio.to_thread(stranger.connect, 5.0)
        stranger.close(0)
        stale = TransportClient(head.control_address, token, PeerId(PeerKind.LEAD, "fake-0", 0), LeadToHead)
        await asyncio.to_thread(stale.connect, 5.0)
        client = Client(head, "r", [1], 5)
        stale.send(Tokens(incarnation=0, sequence=0, events=[]))
        stale.send(Tokens(incarnation=1, sequence=0, events=[]))
        await client.end()
        dropped = head.control.server.counters.dropped
        await until(lambda: dropped[DropReason.STALE] == 2, "both were dropped")
        stale.close(0)
        assert client.tokens == fake_output([1], 3, 5)


async def test_a_second_agent_on_another_node_takes_the_replicas_over(tmp_path) -> None:
    """What `sonar join` will do: an agent of its own, with the token file."""
    async with running_head(tmp_path / "head", "fake step_ms=10") as head:
        await ready(head)
        command = [sys.executable, "-m", "launcher.agent", "--head", str(head.control_address)]
        command += ["--token-file", str(tmp_path / "head/join.token"), "--node-id", "second"]
        command += ["--state-dir", str(tmp_path / "second"), "--engine", "fake=tests.fakes:build_fake_engine"]
        second = await asyncio.create_subprocess_exec(*command)
        await until(lambda: "second" in head.control.state.nodes, "it has joined")
        from cluster.events import NodeDrainRequested

        client = Client(head, "r", [1], 60)
        await client.has(5)
        head.control.feed(NodeDrainRequested("local"))
        await client.end()
        assert client.tokens == fake_output([1], 3, 60)
        replica = head.control.state.replicas["fake-0"]
        await until(lambda: replica.state is ReplicaState.READY and replica.incarnation == 2, "it has moved")
        assert replica.ranks[0].node_id == "second"
        second.terminate()
        assert await asyncio.wait_for(second.wait(), 10) == 0
        assert head.control.state.nodes["second"].state is NodeState.LOST


def test_an_agent_without_a_head_says_so(tmp_path, capsys) -> None:
    (tmp_path / "token").write_text("sonar-join-" + "a" * 43)
    (tmp_path / "token").chmod(0o600)
    flags = ["--head", "127.0.0.1:1", "--token-file", str(tmp_path / "token"), "--state-dir", str(tmp_path / "s")]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert agent_main([*flags, "--connect-timeout-s", "0.3"]) == 1
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    assert "no head answered at 127.0.0.1:1" in capsys.readouterr().err


class HeadProcess:
    """A head of its own process."""

    def __init__(self, state_dir: Path, model: str = "fake step_ms=10", port: int = 0) -> None:
        command = [sys.executable, "-m", "tests.integration.head_main", str(state_dir), str(port), model]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.port = 0

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            news = json.loads(line)
            self.port = news.get("http", self.port)
            if any(replica["state"] == "ready" for replica in news.get("replicas", [])):
                return
        raise AssertionError(f"the head ended: {self.process.communicate()[1]}")

    def generate(self, request_id: str, max_tokens: int) -> list[int]:
        body = json.dumps({"id": request_id, "prompt": [1], "max_tokens": max_tokens, "seed": 3}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/generate", body, timeout=30) as response:
            return [token for line in response for token in json.loads(line)["token_ids"]]

    def children(self) -> list[psutil.Process]:
        return family(self.process.pid)


def wait_gone(processes: list[psutil.Process]) -> float:
    began = time.monotonic()
    while alive(processes):
        assert time.monotonic() - began < 10, alive(processes)
        time.sleep(0.01)
    return time.monotonic() - began


def test_sigkill_of_the_head_takes_everything_with_it(tmp_path) -> None:
    head = HeadProcess(tmp_path)
    head.wait_ready()
    assert head.generate("r", 5) == fake_output([1], 3, 5)
    children = head.children()
    assert len(children) >= 2
    head.process.kill()
    head.process.communicate()
    print("gone after", wait_gone(children))
    again = HeadProcess(tmp_path)
    again.wait_ready()
    again.process.terminate()
    again.process.communicate(timeout=20)
    assert again.process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_finishes_open_streams_and_leaves_nothing(tmp_path, number) -> None:
    head = HeadProcess(tmp_path)
    head.wait_ready()
    children = head.children()
    body = json.dumps({"id": "r", "prompt": [1], "max_tokens": 50, "seed": 3}).encode()
    response = urllib.request.urlopen(f"http://127.0.0.1:{head.port}/generate", body, timeout=30)
    first = response.readline()
    head.process.send_signal(number)
    tokens = [token for line in [first, *response] for token in json.loads(line)["token_ids"]]
    assert tokens == fake_output([1], 3, 50)
    _, errors = head.process.communicate(timeout=20)
    assert head.process.returncode == 0, errors
    wait_gone(children)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", head.port), timeout=1)


def test_two_signals_end_it_without_waiting(tmp_path) -> None:
    head = HeadProcess(tmp_path)
    head.wait_ready()
    children = head.children()
    body = json.dumps({"id": "r", "prompt": [1], "max_tokens": 100_000, "seed": 3}).encode()
    response = urllib.request.urlopen(f"http://127.0.0.1:{head.port}/generate", body, timeout=30)
    response.readline()
    head.process.terminate()
    time.sleep(0.2)
    head.process.terminate()
    head.process.communicate(timeout=4)
    response.close()
    wait_gone(children)


def test_a_model_that_cannot_be_served_ends_the_head_with_the_reason(tmp_path) -> None:
    head = HeadProcess(tmp_path, "fake fail=user")
    _, errors = head.process.communicate(timeout=20)
    assert head.process.returncode == 2
    assert "model 'x' is no file" in errors
    assert "Traceback" not in errors and "step -1" not in errors


async def test_a_port_in_use_is_said_before_anything_starts(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for network in (NetworkConfig(http_port=port, control_port=0), NetworkConfig(http_port=0, control_port=port)):
            with pytest.raises(ConfigError, match=f"{port}.*stop what listens there"):
                Head(ClusterConfig(tmp_path, network=network), plain_app)
    head = Head(ClusterConfig(tmp_path, network=NetworkConfig(http_port=0, control_port=0)), plain_app)
    with pytest.raises(ConfigError, match="another head uses"):
        Head(ClusterConfig(tmp_path, network=NetworkConfig(http_port=0, control_port=0)), plain_app)
    head.request_stop()
    assert (await head.run()).exit_code == 0
    assert oct((tmp_path / "join.token").stat().st_mode)[-3:] == "600"
    assert oct((tmp_path / "head.db").stat().st_mode)[-3:] == "600"


def test_addresses() -> None:
    assert str(Address("::1", 5)) == "[::1]:5"
    assert GenerateRequest("r", "m", [1], SamplingParams(seed=1)).session == ""
