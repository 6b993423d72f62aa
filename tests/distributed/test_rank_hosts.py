"""Ranks on two hosts (network namespaces): steps over CURVE ZMQ, tensors over the interface between them."""

from __future__ import annotations

import pytest

from sonar.config import ParallelConfig
from sonar.engine import build_engine
from tests.distributed.rank_pool import RankPool, make_config
from tests.integration.hosts import running_network
from tests.tiny import write_tiny_folder
from tests.worker.request_mix import everything, run


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with running_network(tmp_path_factory.mktemp("hosts"), "r") as network:
        yield network


@pytest.mark.parametrize(
    ("size", "tp_size", "pp_size"),
    [(2, 1, 2), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((2, 2, 1), (4, 2, 2)))],
)
def test_tokens_are_those_of_one_rank(network, tmp_path, size, tp_size, pp_size):
    folder = str(write_tiny_folder("qwen2", tmp_path / "model"))
    engine = build_engine(make_config(folder, ParallelConfig())).engine
    expected = {name: (one.tokens, one.alternatives) for name, one in run(engine, everything()).items()}
    engine.close()
    if not network.hosts:
        network.host("one", "10.9.0.1/24")
        network.host("two", "10.9.0.2/24")
    pool = RankPool(size, tuple(host.namespace for host in network.hosts), "10.9.0.1")
    (outputs, steps), *followers = pool.run(folder, ParallelConfig(tp_size=tp_size, pp_size=pp_size))
    pool.close()
    assert outputs == expected
    assert followers == [steps] * (size - 1)
