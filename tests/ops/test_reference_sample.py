"""Sampling: against its formula in Python numbers, its statistics, its purity, and rows at the edge."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonar.ops import reference_sample
from sonar.ops.draw_key import draw_key
from sonar.ops.reference import build
from sonar.ops.reference_sample import gumbel_noise
from sonar.ops.table import SamplingTensors
from tests.ops.sample_formula import Row, draw, gumbel, kept, to_tensors

OPS = build(torch.device("cpu"), torch.float32)
INF = math.inf


def _sample(logits: list[list[float]] | Tensor, rows: list[Row]) -> list[int]:
    logits_SV = torch.tensor(logits) if isinstance(logits, list) else logits.clone()
    return OPS.sample(logits_SV, to_tensors(rows)).tolist()


def _drawn_set(logits: list[float], num_draws: int = 400, **changes: float) -> set[int]:
    """Tokens that come up at all."""
    rows = [Row(seed=seed, **changes) for seed in range(num_draws)]  # type: ignore[arg-type]
    return set(_sample([logits] * num_draws, rows))


_SETTINGS = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    typical_p=st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), rows=st.lists(_SETTINGS, min_size=1, max_size=6), num_tokens=st.integers(1, 23))
def test_equals_the_formula(data: st.DataObject, rows: list[Row], num_tokens: int) -> None:
    # Logits on a coarse grid make ties; three in a hundred are banned.
    grid = st.integers(-30, 30).map(lambda i: i * 0.37 if i > -30 else -INF)
    logits = [data.draw(st.lists(grid, min_size=num_tokens, max_size=num_tokens)) for _ in rows]
    logits = [row if max(row) > -INF else [0.0, *row[1:]] for row in logits]
    exact = torch.tensor(logits).double().tolist()
    rows = [
        Row(**{name: torch.tensor(value).double().item() if isinstance(value, float) else value
               for name, value in vars(row).items()})
        for row in rows
    ]  # fmt: skip
    assert _sample(logits, rows) == [draw(values, row) for values, row in zip(exact, rows, strict=True)]


def test_equals_the_formula_over_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_SV = torch.randn(5, 5000, generator=generator) * 2
    rows = [
        Row(seed=1),
        Row(seed=2, top_p=0.8, temperature=0.7),
        Row(seed=3, typical_p=0.6),
        Row(seed=4, top_k=40, min_p=0.05),
        Row(seed=5, top_k=1000, min_p=0.001, typical_p=0.95, top_p=0.95),
    ]
    expected = [draw(logits_SV[i].double().tolist(), row) for i, row in enumerate(rows)]
    assert _sample(logits_SV, rows) == expected


@pytest.mark.parametrize("settings_of_rows", [{}, {"top_p": 1 - 1e-6}], ids=["plain", "filtered"])
def test_frequencies_are_those_of_the_distribution(settings_of_rows: dict[str, float]) -> None:
    p, num_draws = torch.tensor([0.5, 0.3, 0.15, 0.05]), 40_000
    keys = torch.from_numpy(draw_key(np.arange(num_draws), 7))
    base = to_tensors([Row(temperature=2.0, **settings_of_rows)])  # type: ignore[arg-type]
    sampling = SamplingTensors(
        *(
            getattr(base, f"{name}_S").expand(num_draws)
            for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")
        ),
        key_S2=keys,
        all_greedy=False,
        any_filter=base.any_filter,
    )
    drawn_S = OPS.sample((p.log() * 2.0).expand(num_draws, 4).clone(), sampling)
    counts = torch.bincount(drawn_S, minlength=4)
    chi_square = ((counts - num_draws * p).square() / (num_draws * p)).sum().item()
    assert chi_square < 21.1, counts  # 3 degrees of freedom: exceeded by chance once in 10,000


@pytest.mark.parametrize("step", [(0, 1), (1, 0)], ids=["next position", "next seed"])
def test_neighbouring_draws_are_independent(step: tuple[int, int]) -> None:
    num_draws = 40_000
    index = np.arange(num_draws)
    pairs = []
    for offset in (0, 1):
        keys = torch.from_numpy(draw_key(index * 2 + offset * step[0], offset * step[1]))
        pairs.append(gumbel_noise(keys, 3).argmax(dim=-1))
    counts = torch.bincount(pairs[0] * 3 + pairs[1], minlength=9).double()
    chi_square = ((counts - num_draws / 9).square() / (num_draws / 9)).sum().item()
    assert chi_square < 31.8, counts  # 8 degrees of freedom: exceeded by chance once in 10,000


def test_a_row_is_drawn_alike_alone_and_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(temperature=t, top_p=p, seed=s) for s, (t, p) in enumerate([(0, 1), (1, 1), (0.5, 0.9), (2, 0.4)] * 5)]
    logits_SV = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(0))
    together = _sample(logits_SV, rows)
    assert [_sample(logits_SV[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    monkeypatch.setattr(reference_sample, "_MAX_DRAWN_CPU", 3 * 300)
    assert _sample(logits_SV, rows) == together


def test_unfiltered_rows_are_the_same_beside_a_filtered_one() -> None:
    logits_SV = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    rows = [Row(seed=seed) for seed in range(50)]
    assert _sample(logits_SV, rows)[1:] == _sample(logits_SV, [Row(top_k=1), *rows[1:]])[1:]


def test_top_k_keeps_the_lower_ids_of_equal_values() -> None:
    assert _drawn_set([1.0, 3.0, 2.0, 2.0, 2.0], top_k=3) == {1, 2, 3}
    assert _drawn_set([1.0] * 4, top_k=2) == {0, 1}


def test_top_p_keeps_the_smallest_set_of_that_mass() -> None:
    logits = [math.log(p) for p in (0.25, 0.5, 0.25)]
    assert _drawn_set(logits, top_p=0.5) == {1}
    assert _drawn_set(logits, top_p=0.51) == {0, 1}
    assert _drawn_set(logits, top_p=0.76) == {0, 1, 2}
    assert _drawn_set(logits, top_p=1e-9) == {1}


def test_min_p_is_relative_to_the_largest() -> None:
    logits = [math.log(p) for p in (0.5, 0.26, 0.24)]
    assert _drawn_set(logits, min_p=0.5) == {0, 1}
    assert _drawn_set(logits, min_p=1.0) == {0}


def test_typical_p_may_drop_the_most_likely() -> None:
    p = [0.4] + [0.06] * 10
    logits = [math.log(value) for value in p]
    row = Row(typical_p=0.5)
    assert kept(logits, row) == list(range(1, 10))  # entropy 2.05: 0.06 is 0.76 away, 0.4 is 1.14
    assert _drawn_set(logits, num_draws=800, typical_p=0.5) == set(range(1, 10))


def test_each_filter_sees_what_the_one_before_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert _drawn_set(logits, top_k=2, top_p=0.55) == {0}  # 0.4 of 0.7 is 0.57; of the whole it would be 0.4
    assert _drawn_set(logits, top_p=0.55) == {0, 1}


def test_temperature_comes_before_the_filters() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    assert _drawn_set(logits, temperature=4.0, top_p=0.5) == {0, 1}
    assert _drawn_set(logits, temperature=0.1, top_p=0.5) == {0}


def test_greedy_takes_the_lowest_id_of_the_largest() -> None:
    logits = [[0.0, 5.0, 5.0, -1.0], [-INF, -3.0, -INF, -3.0]]
    assert _sample(logits, [Row(temperature=0)] * 2) == [1, 1]
    assert _sample(logits, [Row(temperature=0, top_k=1), Row(temperature=0, seed=9)]) == [1, 1]
    assert _sample(logits, [Row(temperature=0), Row(top_k=1)]) == [1, 1]


def test_banned_tokens_are_never_drawn() -> None:
    logits = [-INF, 0.0, -INF, -80.0, -INF]
    assert _drawn_set(logits) == {1}
    assert _drawn_set(logits, temperature=100.0) == {1, 3}
    for changes in ({"top_k": 5}, {"min_p": 1e-9}, {"typical_p": 0.99}, {"top_p": 0.999}):
        assert _drawn_set(logits, temperature=100.0, **changes) <= {1, 3}


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.5}], ids=str)
@pytest.mark.parametrize("logits", [[-INF] * 5, [7.0], [-INF, -INF, 2.0, -INF]], ids=["none", "single", "one left"])
def test_degenerate_rows_give_a_valid_id(logits: list[float], changes: dict[str, float]) -> None:
    expected = 2 if len(logits) == 4 else 0
    assert _sample([logits], [Row(seed=3, **changes)]) == [expected]  # type: ignore[arg-type]


def test_noise_equals_the_formula() -> None:
    key = draw_key(2**63 - 1, 2**31)
    noise_V = gumbel_noise(torch.from_numpy(key).unsqueeze(0), 3000)[0]
    expected = torch.tensor([gumbel(token, *map(int, key)) for token in range(3000)])
    torch.testing.assert_close(noise_V, expected, rtol=1e-6, atol=0)


def test_noise_is_finite_at_both_ends_of_the_hash() -> None:
    noise = []
    for target in (0, 0xFFFFFFFF):
        key0 = _inverse_fmix32(_inverse_fmix32(target))  # the key whose token 0 hashes to the target, with key1 = 0
        noise.append(gumbel_noise(torch.tensor([[key0, 0]]), 1).item())
    assert noise == pytest.approx([-math.log(25 * math.log(2)), 25 * math.log(2)], rel=1e-6)


def _inverse_fmix32(word: int) -> int:
    word ^= word >> 16
    word = word * pow(0xC2B2AE35, -1, 2**32) % 2**32
    word ^= (word >> 13) ^ (word >> 26)
    word = word * pow(0x85EBCA6B, -1, 2**32) % 2**32
    return word ^ (word >> 16)
