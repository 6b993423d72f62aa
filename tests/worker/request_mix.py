"""Requests of every kind of sampling, and an engine run to their end: what equality tests compare. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from sonar.messages import FinishReason, Submit
from sonar.sampling_params import SamplingParams

MAX_TOKENS = 24
MAX_LEN = 128
SAMPLINGS = (
    {"temperature": 0.0},
    {"seed": 11, "top_p": 0.95},
    {"seed": 12, "temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2, "logit_bias": {70: 3.0, 71: -3.0}},
    {"seed": 13, "top_k": 40, "min_p": 0.01, "bad_words": ((80,), (81, 82)), "min_tokens": 10, "logprobs": 0},
    {"seed": 14, "typical_p": 0.9},
)
PROMPT_LENGTHS = (5, 61, 33, 48, 17, 64)


def request(i, emitted=()):
    # Requests 1, 3 and 5 share a prefix of two blocks.
    shared = [(7 * p) % 250 + 4 for p in range(32)] if i % 2 else []
    prompt = (shared + [(13 * i + 5 * p * p) % 250 + 4 for p in range(64)])[: PROMPT_LENGTHS[i]]
    return Submit(
        incarnation=0,
        request_id=str(i),
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"seed": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **SAMPLINGS[i]}),
        emitted_token_ids=list(emitted),
    )


@dataclass
class Output:
    tokens: list = field(default_factory=list)
    alternatives: list = field(default_factory=list)
    finish: FinishReason | None = None


def run(engine, submits):
    outputs = {submit.request_id: Output(list(submit.emitted_token_ids)) for submit in submits}
    for submit in submits:
        assert engine.add(submit) is None
    while engine.has_work:
        for event in engine.step():
            output = outputs[event.request_id]
            assert output.finish is None and event.first == len(output.tokens)
            output.tokens += event.token_ids
            output.alternatives += [[entry.token_id for entry in row] for row in event.logprobs]
            output.finish = event.finish
    engine.check()
    return outputs


def everything():
    return [request(i) for i in range(len(SAMPLINGS))]
