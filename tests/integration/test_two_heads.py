"""Two heads over a real etcd: the one that leads is killed or stopped in the middle of streams, the other goes on.

The worker is the same throughout, and computes nothing twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster.store.etcd_server import EtcdServers, free_ports, needs_etcd
from tests.fakes import FAKE_ENGINE_FLAG
from tests.integration.cluster_of_one import alive, family
from tests.integration.test_head_adoption import metric
from tests.integration.test_head_restart import DEADLINE_S, readers

pytestmark = needs_etcd
MODEL = "fake step_ms=25 load_steps=1 vocab=256"


class ElectedHead:
    """A head of its own process."""

    def __init__(self, folder: Path, name: str, etcd_url: str) -> None:
        http_port, self.control_port = free_ports(2)
        self.url = f"http://127.0.0.1:{http_port}"
        self._command = [
            *(sys.executable, "-m", "tests.integration.elected_main"),
            *(str(folder / name), str(http_port), str(self.control_port), etcd_url, MODEL),
        ]
        self.log = folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def wait(self, path: str, status: int = 200) -> float:
        began_s = time.monotonic()
        while time.monotonic() - began_s < DEADLINE_S:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + path, timeout=1).status_code == status:
                    return time.monotonic() - began_s
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"{path} is not {status}:\n{self.log.read_text()}")

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(DEADLINE_S) == 0, self.log.read_text()


class Pair:
    """Two heads, of which the first leads, and a host."""

    def __init__(self, folder: Path, etcd_url: str) -> None:
        self.first = ElectedHead(folder, "first", etcd_url)
        self.first.wait("/ready", 503)
        self.second = ElectedHead(folder, "second", etcd_url)
        self.second.wait("/health")
        heads = ",".join(f"127.0.0.1:{head.control_port}" for head in (self.first, self.second))
        flags = {"--head": heads, "--token-file": folder / "token", "--node-id": "n1", "--state-dir": folder / "agent"}
        words = [str(word) for pair in flags.items() for word in pair]
        log = (folder / "agent.log").open("wb")
        command = [sys.executable, "-m", "launcher.agent", *words, "--engine", FAKE_ENGINE_FLAG]
        self.agent = subprocess.Popen(command, stdout=log, stderr=log)
        self.first.wait("/ready")

    def workers(self) -> list[int]:
        return sorted(process.pid for process in family(self.agent.pid))

    def close(self) -> None:
        processes = [psutil.Process(self.agent.pid), *family(self.agent.pid)] if self.agent.poll() is None else []
        for process in (self.first.process, self.second.process, self.agent):
            process.kill()
            process.wait()
        psutil.wait_procs(processes, timeout=10)
        assert not alive(processes)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    (tmp_path / "etcd").mkdir()
    etcd = EtcdServers(tmp_path / "etcd").start()
    made = Pair(tmp_path, etcd.urls[0])
    try:
        yield made
    finally:
        made.close()
        etcd.stop()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_the_other_head_goes_on_with_the_streams(pair: Pair, sent: signal.Signals) -> None:
    first, second = pair.first, pair.second
    whole, broken = readers(), readers()
    for number, reader in enumerate(whole):
        assert reader.read((first, second)[number % 2].url), "a standby passes requests on"
    answer = httpx.get(second.url + "/ready")
    assert answer.status_code == 503 and answer.headers["retry-after"] and answer.headers["sonar-leader"] == first.url
    for reader in broken:
        assert reader.read(first.url, until=25)
    workers = pair.workers()
    os.kill(first.process.pid, sent)
    print(f"{sent.name}: the other head is ready {second.wait('/ready'):.2f} s later", end=", ")
    began_s = time.monotonic()
    for reader, unbroken in zip(broken, whole, strict=True):
        assert reader.read(second.url)
        assert reader.said() == unbroken.said() and reader.usage() == unbroken.usage()
    print(f"streams at their end after {time.monotonic() - began_s:.2f} s more")
    assert pair.workers() == workers
    assert metric(second, "sonar_tokens_replayed_total") == metric(second, "sonar_migrations_total") == 0
    if sent == signal.SIGSTOP:
        os.kill(first.process.pid, signal.SIGCONT)
    else:
        first.process.wait()
        first.start()
    first.wait("/ready", 503)
    first.wait("/health")
    body = {"model": "fake", "prompt": "one", "max_tokens": 3}
    assert httpx.post(first.url + "/v1/completions", json=body, timeout=DEADLINE_S).status_code == 200
    assert httpx.get(first.url + "/ready").headers["sonar-leader"] == second.url
    time.sleep(1.0)  # it follows, and takes over when the one that leads is asked to stop
    second.stop()
    first.wait("/ready")
    assert pair.workers() == workers
