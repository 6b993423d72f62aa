"""The demo model as CPUs serve it by default, in 8-bit activations: the same tokens in any company, close to exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sonar import LLM, SamplingParams

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_smollm2.json").read_text())["completion"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5)
# What rounding activations to 8 bits moves a log probability by, at most, with room: 0.2 was seen.
CLOSE = 0.5


def tokens(outputs):
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def alone():
    """Each prompt by itself, whole, without prefix cache, by the default settings."""
    prompts = [case["prompt"] for case in GOLDEN.values()]
    with LLM("smollm2-135m", device="cpu", threads=1, enable_prefix_caching=False) as llm:
        assert llm.config.activations == "int8"
        return prompts, [llm.generate(prompt, GREEDY)[0] for prompt in prompts]


def test_mixed_chunked_and_from_the_cache_it_is_bit_equal(alone):
    prompts, expected = alone
    with LLM("smollm2-135m", device="cpu", threads=2, max_num_requests=4, max_step_tokens=7) as llm:
        assert tokens(llm.generate(prompts, GREEDY)) == tokens(expected)
        again = llm.generate(prompts, GREEDY)
        assert tokens(again) == tokens(expected)
        assert any(output.usage.cached_tokens for output in again)


def test_going_on_after_a_cut_it_is_bit_equal(alone):
    _, expected = alone
    cut = [output.prompt_token_ids + output.outputs[0].token_ids[:5] for output in expected]
    with LLM("smollm2-135m", device="cpu", threads=1) as llm:
        rest = llm.generate(cut, SamplingParams(temperature=0.0, max_tokens=7, logprobs=5))
    for whole, tail in zip(expected, rest):
        assert whole.outputs[0].token_ids[5:] == tail.outputs[0].token_ids
        assert whole.outputs[0].logprobs[5:] == tail.outputs[0].logprobs


def test_it_is_close_to_exact(alone):
    _, outputs = alone
    for case, output in zip(GOLDEN.values(), outputs):
        drawn, *_ = output.outputs[0].logprobs[0]
        exact = dict(case["first_step_top5_logprobs"])
        assert drawn.token_id in exact
        assert drawn.logprob == pytest.approx(exact[drawn.token_id], abs=CLOSE)
