"""Replicas of real processes over gloo give the tokens of one rank: greedy, drawn, filtered, penalized, scored."""

from __future__ import annotations

import pytest

from sonar.config import ParallelConfig
from sonar.engine import build_engine
from sonar.ops.reference_sample import sample as reference_sample
from tests.distributed.jobs import draw_case
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
    ("qwen3_moe", "tp2"),
    ("deepseek_v3", "tp4"),
    ("gpt_oss", "tp2pp2"),
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


EXPERT_SHAPES = {
    "ep2": ParallelConfig(dp_size=2, ep_size=2),
    "ep4": ParallelConfig(dp_size=4, ep_size=4, redundant_experts=2),
    "ep2pp2": ParallelConfig(dp_size=2, pp_size=2, ep_size=2),
    "ep2tp2": ParallelConfig(tp_size=2, ep_size=2),
    "ep4tp2": ParallelConfig(dp_size=2, tp_size=2, ep_size=4),
}
EXPERT_FAMILIES = ("qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
QUICK_EXPERTS = {("qwen3_moe", "ep4"), ("deepseek_v3", "ep2pp2"), ("gpt_oss", "ep4tp2")}


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(family, shape, marks=() if (family, shape) in QUICK_EXPERTS else pytest.mark.slow)
        for family in EXPERT_FAMILIES
        for shape in EXPERT_SHAPES
    ],
)
def test_tokens_are_those_of_one_rank_with_experts_on_others(pool, one_rank, family, shape):
    folder, expected = one_rank(family)
    (outputs, steps), *followers = pool.run(folder, EXPERT_SHAPES[shape])
    assert outputs == expected
    assert followers == [steps] * len(followers), "every rank took every step"


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_sums_are_in_the_order_of_the_ranks_wherever_an_element_lies(pool, tp_size):
    answers = pool.run("", ParallelConfig(tp_size=tp_size), "sums")
    assert all(answer[:2] == answers[0][:2] for answer in answers)
    assert answers[0][1] == [[rank, 7] for rank in range(tp_size)]
    assert [answer[2]["sums"] for answer in answers] == [3] * tp_size


@pytest.mark.parametrize(
    "shape",
    [
        ParallelConfig(dp_size=2, ep_size=2, rebalance_steps=8),
        ParallelConfig(dp_size=4, ep_size=4),
        ParallelConfig(dp_size=2, tp_size=2, ep_size=4, rebalance_steps=8),
        ParallelConfig(dp_size=2, pp_size=2, ep_size=2, rebalance_steps=8),
    ],
    ids=["dp2", "dp4", "dp2tp2", "dp2pp2"],
)
def test_tokens_come_back_from_experts_elsewhere_and_skewed_load_is_evened_out(pool, shape):
    answers = pool.run("", shape, "experts")
    figures = [answer[:2] for answer in answers]
    assert figures == [figures[0]] * shape.world_size, "all ranks find the same"
    seen, num_moved = figures[0]
    if not shape.rebalance_steps:
        assert (num_moved, seen[-1]) == (0, 0.0), "not measured yet"
        return
    assert num_moved > 0
    assert seen[-1] < 1.4, seen
    assert all(answer[2]["exchanges"] == 3 * 2 * 40 for answer in answers)


@pytest.mark.parametrize("tp_size", [2, 3])
def test_draws_from_spread_columns_are_those_from_whole_rows(pool, tp_size):
    logits_SV, settings = draw_case()
    expected = reference_sample(logits_SV, settings).tolist()
    assert pool.run("", ParallelConfig(tp_size=tp_size), "draws") == [expected] * tp_size
