"""The head alone is killed: its agent and workers live, and the next head goes on with what they have computed."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import httpx
import psutil

from cluster.agent_lock import lock_holder
from tests.demo_server import free_port
from tests.integration.cluster_of_one import alive, family
from tests.integration.test_head_restart import MODEL, ApiHead, readers


def metric(head: ApiHead, name: str) -> float:
    found = re.search(rf"^{name} (\S+)", httpx.get(head.url + "/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def host_of(state_dir: Path) -> list[psutil.Process]:
    """The agent of that head and its workers."""
    holder = lock_holder(state_dir / "agent")
    assert holder is not None
    return [psutil.Process(holder.pid), *family(holder.pid)]


def test_the_next_head_takes_running_workers_over_and_nothing_is_computed_again(tmp_path: Path) -> None:
    port = free_port()
    head = ApiHead(tmp_path, port, MODEL, "2", "20")
    head.wait("/ready")
    whole, broken = readers(), readers()
    for reader in whole:
        assert reader.read(head.url)
    host = {process.pid for process in host_of(tmp_path)}
    num_resumed = 0.0
    for kill in range(1, 3):
        for reader in broken:
            assert reader.read(head.url, until=25 * kill)
        head.kill()
        time.sleep(0.4)  # so long they compute without a head
        head = ApiHead(tmp_path, port, MODEL, "2", "20")
        print(f"ready after {head.wait('/ready'):.2f} s", end=", ")
        num_resumed += metric(head, "sonar_attempts_resumed_total")
    for reader, unbroken in zip(broken, whole, strict=True):
        assert reader.read(head.url)
        assert reader.said() == unbroken.said()
        assert reader.usage() == unbroken.usage()
    assert {process.pid for process in host_of(tmp_path)} == host, "the same agent and workers"
    assert metric(head, "sonar_tokens_replayed_total") == metric(head, "sonar_migrations_total") == 0
    assert num_resumed >= 5, "each sequence of the three streams, at the first new head at least"
    host_processes = host_of(tmp_path)
    head.stop()
    assert not alive(host_processes), "an agent that was taken over ends with its head"


def test_workers_that_no_head_comes_back_for_end_in_time(tmp_path: Path) -> None:
    head = ApiHead(tmp_path, free_port(), MODEL, "1", "1.5")
    head.wait("/ready")
    host = host_of(tmp_path)
    head.process.send_signal(signal.SIGKILL)
    head.process.communicate()
    time.sleep(0.7)
    assert alive(host) == host
    _, left = psutil.wait_procs(host, timeout=15)
    assert not left
