"""Replicas of real processes over gloo give the tokens of one rank: greedy, drawn, filtered, penalized, scored."""

from __future__ import annotations

import pytest

from sonar.config import ParallelConfig
from sonar.engine import build_engine
from tests.distributed.rank_pool import RankPool, make_config
from tests.tiny import FAMILIES, write_tiny_folder
from tests.worker.request_mix import everything, run

SHAPES = {"tp2": (2, 1), "tp4": (4, 1), "tp3": (3, 1), "pp2": (1, 2), "pp3": (1, 3), "pp4": (1, 4), "tp2pp2": (2, 2)}
# The rest of the matrix takes a minute.
QUICK = {
    ("llama", "tp2"),
    ("qwen2", "tp4"),
    ("gemma3", "tp3"),
    ("mistral", "pp2"),
    ("gemma3", "pp4"),
    ("gpt2", "tp2pp2"),
}
CASES = [
    pytest.param(family, shape, marks=() if (family, shape) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for shape in SHAPES
]


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Folder and outputs of one rank alone, by family."""
    made = {}

    def get(family):
        if family not in made:
            folder = str(write_tiny_folder(family, tmp_path_factory.mktemp(family)))
            engine = build_engine(make_config(folder, ParallelConfig())).engine
            outputs = run(engine, everything())
            engine.close()
            made[family] = folder, {name: (one.tokens, one.alternatives) for name, one in outputs.items()}
        return made[family]

    return get


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_tokens_are_those_of_one_rank(pool, one_rank, family, shape):
    folder, expected = one_rank(family)
    tp_size, pp_size = SHAPES[shape]
    (outputs, steps), *followers = pool.run(folder, ParallelConfig(tp_size=tp_size, pp_size=pp_size))
    assert outputs == expected
    assert followers == [steps] * (tp_size * pp_size - 1), "every rank took every step"
