"""Drawing on the CPU kernels: against the formula in Python numbers, against the reference, and rows at the edge."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonar.ops import reference_sample
from tests.ops.cpu_case import LEVELS, at_level, build, with_threads
from tests.ops.sample_formula import Row, draw, to_tensors

INF = math.inf
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


def _sample(logits: list[list[float]] | Tensor, rows: list[Row]) -> list[int]:
    logits_SV = torch.tensor(logits) if isinstance(logits, list) else logits.clone()
    drawn: list[int] = build().sample(logits_SV, to_tensors(rows)).tolist()
    return drawn


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    rows=st.lists(_SETTINGS, min_size=1, max_size=6),
    num_tokens=st.integers(1, 40),
    level=st.sampled_from(LEVELS),
)
def test_equals_the_formula(data: st.DataObject, rows: list[Row], num_tokens: int, level: str) -> None:
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
    with at_level(level):
        assert _sample(logits, rows) == [draw(values, row) for values, row in zip(exact, rows, strict=True)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 0.0},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"typical_p": 0.9},
        {"top_k": 400, "min_p": 0.001, "typical_p": 0.95, "top_p": 0.97, "temperature": 1.3},
    ],
    ids=str,
)
def test_equals_the_reference_over_a_real_vocabulary(changes: dict[str, float]) -> None:
    num_rows, generator = 12, torch.Generator().manual_seed(0)
    logits_SV = torch.randn(num_rows, 49_153, generator=generator) * 3
    rows = [Row(seed=seed, position=7 * seed, **changes) for seed in range(num_rows)]  # type: ignore[arg-type]
    expected = reference_sample.sample(logits_SV.clone(), to_tensors(rows)).tolist()
    for level in LEVELS:
        with at_level(level):
            assert _sample(logits_SV, rows) == expected


def test_a_flat_distribution_keeps_almost_all_and_still_sorts_by_id() -> None:
    logits_SV = torch.zeros(8, 20_000)
    rows = [Row(seed=seed, top_p=0.75) for seed in range(8)]
    expected = reference_sample.sample(logits_SV.clone(), to_tensors(rows)).tolist()
    assert _sample(logits_SV, rows) == expected
    assert max(expected) < 15_000


def test_a_row_is_drawn_alike_alone_and_on_any_number_of_threads() -> None:
    rows = [Row(temperature=t, top_p=p, seed=s) for s, (t, p) in enumerate([(0, 1), (1, 1), (0.5, 0.9), (2, 0.4)] * 5)]
    logits_SV = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(0))
    together = _sample(logits_SV, rows)
    assert [_sample(logits_SV[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    table, sampling = build(), to_tensors(rows)
    for threads in (1, 3):
        with with_threads(threads):
            assert table.sample(logits_SV.clone(), sampling).tolist() == together


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.5}], ids=str)
@pytest.mark.parametrize("logits", [[-INF] * 5, [7.0], [-INF, -INF, 2.0, -INF]], ids=["none", "single", "one left"])
def test_degenerate_rows_give_a_valid_id(logits: list[float], changes: dict[str, float]) -> None:
    expected = 2 if len(logits) == 4 else 0
    assert _sample([logits], [Row(seed=3, **changes)]) == [expected]  # type: ignore[arg-type]
    assert _sample([logits], [Row(temperature=0.0)]) == [expected]


def test_greedy_takes_the_lowest_id_of_the_largest_wherever_it_lies() -> None:
    for size in (1, 15, 16, 17, 100):
        for place in range(size):
            logits_SV = torch.zeros(1, size)
            logits_SV[0, place:] = 1.0
            assert _sample(logits_SV, [Row(temperature=0.0)]) == [place]
