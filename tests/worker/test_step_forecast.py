"""What a step is expected to take: bounds from steps before it, of any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sonar.worker.step_forecast import NEW_SIZE_S, UNKNOWN_S, StepForecast


def test_before_anything_was_measured_it_may_take_minutes() -> None:
    assert StepForecast().expected_s(1) == UNKNOWN_S


def test_a_size_is_expected_to_take_what_it_took() -> None:
    forecast = StepForecast()
    forecast.measured(5, 0.2)
    assert forecast.expected_s(7) == 0.2, "of the same class"


def test_a_new_size_is_bounded_by_what_is_known() -> None:
    forecast = StepForecast()
    forecast.measured(4, 1.0)
    assert forecast.expected_s(2048) == 512.0, "in proportion to its tokens"
    assert forecast.expected_s(8) == NEW_SIZE_S, "it may have to be compiled"
    forecast.measured(2048, 100.0)
    assert forecast.expected_s(1) == NEW_SIZE_S, "4 tokens took less"


def test_one_slow_step_is_forgotten_by_and_by() -> None:
    forecast = StepForecast()
    forecast.measured(1, 10.0)
    for _ in range(40):
        forecast.measured(1, 0.01)
    assert forecast.expected_s(1) < 0.05


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.001, 100.0)), min_size=1), st.integers(1, 10_000))
def test_a_step_is_never_expected_to_be_quicker_than_the_last_of_its_size(
    steps: list[tuple[int, float]], num_tokens: int
) -> None:
    forecast = StepForecast()
    for tokens, seconds in steps:
        forecast.measured(tokens, seconds)
    same = [seconds for tokens, seconds in steps if tokens.bit_length() == num_tokens.bit_length()]
    assert forecast.expected_s(num_tokens) >= (same[-1] if same else NEW_SIZE_S)
