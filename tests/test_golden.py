"""The demo model against an independent implementation: float32, greedy, from the same GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sonar import LLM, SamplingParams

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_smollm2.json").read_text())
MARGIN = 0.05
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def outputs():
    """All prompts in one mixed batch, chunked: text prompts, then chats."""
    sampling = SamplingParams(temperature=0.0, max_tokens=48, logprobs=5)
    with LLM(
        "smollm2-135m", device="cpu", dtype="float32", activations="float32", max_step_tokens=500, max_num_requests=8
    ) as llm:
        completions = llm.generate([case["prompt"] for case in GOLDEN["completion"].values()], sampling)
        chats = llm.chat([[{"role": "user", "content": case["user"]}] for case in GOLDEN["chat"].values()], sampling)
    return dict(zip([*GOLDEN["completion"], *GOLDEN["chat"]], [*completions, *chats]))


CASES = {**GOLDEN["completion"], **GOLDEN["chat"]}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_golden_ones(outputs, name):
    case, output = CASES[name], outputs[name]
    assert output.prompt_token_ids == case["prompt_token_ids"]
    close_calls = [i for i, margin in enumerate(case["top2_logit_margin"]) if margin < MARGIN]
    end = close_calls[0] if close_calls else len(case["output_token_ids"])
    assert output.outputs[0].token_ids[:end] == case["output_token_ids"][:end]
    if not close_calls:
        assert output.text == case["output_text"]


@pytest.mark.parametrize("name", CASES)
def test_first_log_probabilities_are_the_golden_ones(outputs, name):
    alternatives = outputs[name].outputs[0].logprobs[0][1:]
    golden = CASES[name]["first_step_top5_logprobs"]
    assert [entry.token_id for entry in alternatives] == [token for token, _ in golden]
    assert [entry.logprob for entry in alternatives] == pytest.approx([value for _, value in golden], abs=TOLERANCE)
