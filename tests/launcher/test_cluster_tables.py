"""What `sonar status` shows of a cluster."""

from __future__ import annotations

from cluster.status import ClusterStatus, NodeStatus, ReplicaStatus
from launcher.cli.cluster_tables import cluster_lines


def node(node_id: str, state: str = "up", *, is_drained: bool = False, is_leaving: bool = False) -> NodeStatus:
    return NodeStatus(
        node_id=node_id,
        state=state,
        hostname=node_id,
        cpu_cores=8,
        memory_bytes=64 << 30,
        num_devices=2,
        is_drained=is_drained,
        silent_s=0.25,
        note="silent for 3 s" if state == "lost" else "",
        is_leaving=is_leaving,
        address="10.1.0.2",
        interface="eth0",
    )


def replica(state: str, phase: str = "", note: str = "", last_end: str = "") -> ReplicaStatus:
    return ReplicaStatus(
        replica_id="m-0",
        deployment="m",
        state=state,
        incarnation=4,
        state_s=75.0,
        phase=phase,
        done=3,
        total=9,
        note=note,
        failures=0,
        last_end=last_end,
        is_permanent=False,
        log_tail="",
        nodes=["a", "a", "b"],
        pids=[1, 2, 3],
        log_paths=["", "", ""],
        num_open=5,
        stats={"num_running": 4.0, "blocks_in_use": 7.0, "blocks_total": 64.0} if state == "ready" else None,
    )


def lines(*nodes: NodeStatus, of: ReplicaStatus, missing: tuple[str, ...] = ()) -> list[list[str]]:
    status = ClusterStatus(
        nodes=list(nodes), replicas=[of], num_open_requests=5, is_stopping=False, missing_nodes=list(missing)
    )
    return [line.split() for line in cluster_lines(status)]


def test_a_row_a_node_and_a_row_a_replica() -> None:
    shown = lines(
        node("a"), node("b", is_drained=True), node("c", is_leaving=True), node("d", "lost"), of=replica("ready")
    )
    assert shown[1][:7] == ["a", "up", "10.1.0.2", "eth0", "8", "64", "GiB"]
    assert [row[1] for row in shown[1:5]] == ["up", "drained", "leaving", "lost"]
    assert shown[4][-4:] == ["silent", "for", "3", "s"]
    assert shown[7] == ["m-0", "ready", "1", "min", "a,b", "4", "5", "4", "7/64"]
    assert shown[-1] == ["5", "open", "requests"]


def test_what_is_under_way_and_what_is_missing_is_said() -> None:
    assert "weights 3/9" in " ".join(lines(node("a"), of=replica("loading", phase="weights"))[4])
    waiting = lines(node("a"), of=replica("placing", note="waits for nodes: b"), missing=("b",))
    assert waiting[4][-4:] == ["waits", "for", "nodes:", "b"] and ["waits", "for", "nodes:", "b"] in waiting
    failed = lines(node("a"), of=replica("failed", last_end="rank 0 ended\nsecond line"))[4]
    assert failed[-3:] == ["rank", "0", "ended"]
