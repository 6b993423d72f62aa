"""Arithmetic of a run: percentiles, latencies, rates, the table and the JSON."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.bench.arrivals import Arrival, arrival_times
from launcher.bench.report import Run, table, write_json
from launcher.bench.stats import RequestRecord, Spread, percentile, summarize

FINITE = st.floats(min_value=-1e6, max_value=1e6)


@given(st.lists(FINITE, min_size=1, max_size=40), st.floats(min_value=0, max_value=100))
def test_percentile_lies_between_its_neighbours_and_grows(samples: list[float], percent: float) -> None:
    ordered = sorted(samples)
    value = percentile(ordered, percent)
    assert ordered[0] - 1e-6 <= value <= ordered[-1] + 1e-6
    assert value <= percentile(ordered, 100) + 1e-6


@given(st.lists(FINITE, min_size=1, max_size=40))
def test_median_agrees_with_the_standard_library(samples: list[float]) -> None:
    assert percentile(sorted(samples), 50) == pytest.approx(statistics.median(samples), abs=1e-6)


def test_no_sample_is_no_figure() -> None:
    assert Spread.of([]) is None


def two_requests_and_a_failure() -> list[RequestRecord]:
    return [
        RequestRecord(10.0, [10.5, 10.6, 10.8], 11.0, prompt_tokens=20, cached_tokens=16, output_tokens=6),
        RequestRecord(10.0, [11.0], 11.0, prompt_tokens=10, output_tokens=1),
        RequestRecord(10.0, [10.1], 10.2, error="HTTP 429 queue full"),
    ]


def test_summary_of_a_hand_made_run() -> None:
    summary = summarize(two_requests_and_a_failure(), duration_s=2.0)
    assert (summary.completed, summary.failed, summary.errors) == (2, 1, {"HTTP 429 queue full": 1})
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (30, 16, 7)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (1.0, 3.5, 18.5)
    assert summary.ttft_ms is not None and (summary.ttft_ms.min, summary.ttft_ms.max) == pytest.approx((500, 1000))
    assert summary.itl_ms is not None and (summary.itl_ms.min, summary.itl_ms.max) == pytest.approx((100, 200))
    # 0.5 s after the first token for the 5 others; a one-token answer has no time per output token
    assert summary.tpot_ms is not None and (summary.tpot_ms.count, summary.tpot_ms.p50) == (1, pytest.approx(100))
    assert summary.e2e_ms is not None and summary.e2e_ms.p50 == pytest.approx(1000)


def test_all_failed_run_has_no_latencies_and_still_prints() -> None:
    summary = summarize([RequestRecord(0.0, error="connection lost")], duration_s=1.0)
    assert summary.ttft_ms is summary.e2e_ms is None
    text = table([Run("1 streams", {}, summary)])
    assert "1 x connection lost" in text and "0 / 1" in text


def test_table_and_json_carry_every_run(tmp_path: Path) -> None:
    summary = summarize(two_requests_and_a_failure(), duration_s=2.0)
    runs = [Run("1 streams", {"a": 1}, summary), Run("8 streams", {"a": 2}, summary)]
    assert table(runs).splitlines()[0].split() == ["1", "streams", "8", "streams"]
    write_json(str(tmp_path / "out.json"), "serve", runs)
    document = json.loads((tmp_path / "out.json").read_text())
    assert [run["label"] for run in document["runs"]] == ["1 streams", "8 streams"]
    assert document["runs"][1]["summary"]["output_tokens_per_s"] == 3.5


def test_arrivals_are_seeded_and_keep_the_rate() -> None:
    times = arrival_times(4000, rate=20.0, kind=Arrival.POISSON, seed=3)
    assert times[0] == 0.0 and times == sorted(times)
    assert times == arrival_times(4000, rate=20.0, kind=Arrival.POISSON, seed=3)
    assert times[-1] == pytest.approx(200.0, rel=0.1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.1)  # exponential gaps: deviation equals mean
    assert arrival_times(3, rate=2.0, kind=Arrival.CONSTANT, seed=0) == [0.0, 0.5, 1.0]
