"""The plan is what the head would do, and says what has no place or does not fit."""

from __future__ import annotations

import pytest

from cluster.config import DeploymentConfig, NodesConfig
from cluster.plan import PlanNode, plan_cluster
from launcher.cli.plan import parse_node, plan_lines
from sonar.config import CacheConfig, EngineConfig, ParallelConfig
from sonar.errors import UserError

GIB = 2**30


def deployment(name: str = "m", replicas: int = 1, tp: int = 1, pp: int = 1, kv: int = 0) -> DeploymentConfig:
    engine = EngineConfig("x", cache=CacheConfig(memory_bytes=kv), parallel=ParallelConfig(tp, pp))
    return DeploymentConfig(name, engine, replicas=replicas)


def test_replicas_spread_over_hosts_and_groups_stay_inside_one() -> None:
    nodes = [PlanNode("a", (80 * GIB,) * 2), PlanNode("b", (80 * GIB,) * 4)]
    plan = plan_cluster([deployment(replicas=3, tp=2)], nodes, {"m": 100 * GIB}, NodesConfig())
    assert plan.problems == ()
    hosts = {
        rank.replica_id: {r.node.node_id for r in plan.ranks if r.replica_id == rank.replica_id} for rank in plan.ranks
    }
    assert sorted(map(len, hosts.values())) == [1, 1, 1]
    assert {rank.weights_bytes for rank in plan.ranks} == {50 * GIB}
    used = [(rank.node.node_id, device) for rank in plan.ranks for device in rank.devices]
    assert len(set(used)) == len(used) == 6


def test_what_has_no_place_is_named_once_a_deployment() -> None:
    plan = plan_cluster([deployment(replicas=9, tp=2)], [PlanNode("a", (GIB,) * 4)], {}, NodesConfig())
    assert len(plan.ranks) == 4
    (problem,) = plan.problems
    assert problem.startswith("m-2 has no place: needs 2 CUDA devices") and "a 0/4" in problem


@pytest.mark.parametrize(
    ("nodes", "config", "words"),
    [
        ([PlanNode("a", (16 * GIB,))], deployment(kv=4 * GIB), "device 0 of a has 16.0 GiB"),
        ([PlanNode("a", memory_bytes=32 * GIB)], deployment(replicas=3), "3 ranks would need 42.0 GiB"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_figures(nodes: list[PlanNode], config, words: str) -> None:
    plan = plan_cluster([config], nodes, {"m": 14 * GIB}, NodesConfig())
    assert [words in problem for problem in plan.problems] == [True]
    assert any(line.startswith("error: ") and words in line for line in plan_lines(plan))


def test_unknown_sizes_are_no_problem_and_shown_as_such() -> None:
    plan = plan_cluster([deployment(tp=2)], [PlanNode("a", (0, 0))], {}, NodesConfig(("a",), min=1))
    assert plan.problems == () and {rank.weights_bytes for rank in plan.ranks} == {-1}
    assert "?" in plan_lines(plan)[1]


def test_missing_hosts_are_problems() -> None:
    plan = plan_cluster([deployment()], [PlanNode("a")], {}, NodesConfig(("a", "b"), min=3))
    assert plan.problems == (
        "node b is expected and not among the hosts",
        "3 nodes are needed (min under [nodes]), there are 1",
    )


def test_imagined_hosts() -> None:
    assert parse_node("gpu-1=8x80") == PlanNode("gpu-1", (80 * GIB,) * 8)
    assert parse_node("gpu-1=2x80GiB,512") == PlanNode("gpu-1", (80 * GIB,) * 2, 512 * GIB)
    assert parse_node("cpu-1,64") == PlanNode("cpu-1", (), 64 * GIB)
    with pytest.raises(UserError, match="write NAME"):
        parse_node("a=b")
