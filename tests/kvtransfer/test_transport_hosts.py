"""NIXL between two hosts (network namespaces): blocks cross the network, and a cut link ends in a lost read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.hosts import Host, ip, running_network

SIZE = 8 << 20

pytestmark = pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="needs NIXL: pip install --no-deps nixl-cu13")


def _start(host: Host, module: str, *arguments: str) -> subprocess.Popen[str]:
    # By TCP alone: between namespaces of one kernel the library would find the other process's memory.
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", f"tests.kvtransfer.{module}", *arguments]
    environ = {**os.environ, "UCX_TLS": "tcp,self"}
    return subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _next_line(process: subprocess.Popen[str]) -> dict:
    assert process.stdout is not None
    return json.loads(next(line for line in process.stdout if line.startswith("{")))


def _read(process: subprocess.Popen[str]) -> dict:
    assert process.stdin is not None
    process.stdin.write("read\n")
    process.stdin.flush()
    return _next_line(process)


def test_blocks_cross_the_network_and_a_cut_link_is_a_lost_read(tmp_path: Path) -> None:
    with running_network(tmp_path, "kv") as network:
        one, other = network.host("one", "10.78.0.1/24"), network.host("other", "10.78.0.2/24")
        with _start(one, "holding_process", "nixl", str(SIZE)) as holder:
            said = _next_line(holder)
            where = (str(SIZE), str(said["address"]), said["metadata"])
            with _start(other, "reading_process", "nixl", *where) as reader:
                assert _read(reader) == {"state": "done", "error": "", "equal": True}
                ip("-n", one.namespace, "link", "set", "eth0", "down")
                lost = _read(reader)
                assert lost["state"] == "lost" and "did not end in time" in lost["error"]
                reader.kill()
            holder.kill()
