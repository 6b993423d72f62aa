"""Bad hosts are named with the value that is wrong and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.preflight import cluster_findings, joining_findings, probe_findings
from cluster.status import ClusterStatus, NodeStatus

VERSIONS = {"torch": "2.13.0", "python": "3.11.7", "transformers": "5.0"}


def node(node_id: str, **fields: Any) -> NodeStatus:
    known: dict[str, Any] = {
        "node_id": node_id,
        "state": "up",
        "hostname": node_id,
        "cpu_cores": 4,
        "memory_bytes": 8 << 30,
        "num_devices": 0,
        "is_drained": False,
        "silent_s": 0.1,
        "note": "",
        "address": f"10.1.0.{ord(node_id[-1]) % 200}",
        "interface": "eth0",
        "versions": VERSIONS,
        "mtu": 1500,
        "memory_available_bytes": 4 << 30,
        "disk_free_bytes": 50 << 30,
    }
    return NodeStatus(**{**known, **fields})


def status(*nodes: NodeStatus, missing: tuple[str, ...] = ()) -> ClusterStatus:
    return ClusterStatus(
        nodes=list(nodes), replicas=[], num_open_requests=0, is_stopping=False, missing_nodes=list(missing)
    )


def test_sound_hosts_have_no_findings() -> None:
    assert cluster_findings(status(node("a"), node("b")), VERSIONS) == []
    assert joining_findings(node("a"), {**VERSIONS, "torch": ""}) == [], "a head may lack torch"


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"clock_skew_s": -9.0}, ["9.0 s behind", "chrony"]),
        ({"versions": {**VERSIONS, "torch": "2.11.0"}}, ["torch is 2.11.0 there, 2.13.0", "same version"]),
        ({"versions": {**VERSIONS, "torch": ""}}, ["torch is not installed there"]),
        ({"disk_free_bytes": 5 << 20}, ["5 MiB", "--state-dir"]),
        ({"memory_available_bytes": 5 << 20}, ["5 MiB of memory"]),
        ({"mtu": 1400}, ["MTU of eth0 is 1400, elsewhere 1500"]),
        ({"address": "127.0.0.1"}, ["127.0.0.1, which other hosts cannot reach", "--address"]),
        ({"state": "lost", "note": "silent for 3 s"}, ["is lost (silent for 3 s)", "sonar join"]),
    ],
)
def test_an_odd_host_is_named(odd: dict[str, Any], words: list[str]) -> None:
    (finding,) = cluster_findings(status(node("a"), node("b"), node("odd", **odd)), VERSIONS)
    assert finding.node_id == "odd" and [word for word in words if word not in str(finding)] == []


def test_a_missing_host_is_fatal() -> None:
    (finding,) = cluster_findings(status(node("a"), missing=("c",)), VERSIONS)
    assert finding.is_fatal and str(finding).startswith("c: has not joined")


def test_probes_name_the_pair_that_does_not_reach_each_other() -> None:
    nodes = (
        node("a", probe_number=4, reach={"b": 0.0002, "c": -1.0}),
        node("b", probe_number=4, reach={"a": 0.2, "c": 0.001}),
        node("c", probe_number=3, reach={}),
    )
    fatal, slow, silent = probe_findings(status(*nodes), 4)
    assert fatal.is_fatal and "a: cannot reach c at 10.1.0.99" in str(fatal)
    assert not slow.is_fatal and "b: needs 200 ms to a" in str(slow)
    assert silent.is_fatal and "c: did not answer" in str(silent)
