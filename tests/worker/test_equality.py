"""The same request gives the same tokens in whatever company, chunks, cache state or incarnation it is computed.

With real (tiny, random) models, through engine, scheduler, runner and sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from sonar.config import CacheConfig, EngineConfig, SchedulerConfig
from sonar.engine import build_engine
from sonar.messages import FinishReason, Submit
from sonar.sampling_params import SamplingParams
from tests.tiny import write_tiny_folder

# Full layers alone, sliding layers alone, and both: one or two cache groups.
FAMILIES = ("llama", "mistral", "gemma3")
MAX_TOKENS = 24
MAX_LEN = 128
TIGHT_BYTES = {"llama": 11 * 16384, "mistral": 10 * 16384, "gemma3": 9 * 4 * 8192}
SAMPLINGS = (
    {"temperature": 0.0},
    {"seed": 11, "top_p": 0.95},
    {"seed": 12, "temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2, "logit_bias": {70: 3.0, 71: -3.0}},
    {"seed": 13, "top_k": 40, "min_p": 0.01, "bad_words": ((80,), (81, 82)), "min_tokens": 10, "logprobs": 0},
    {"seed": 14, "typical_p": 0.9},
)
PROMPT_LENGTHS = (5, 61, 33, 48, 17, 64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: write_tiny_folder(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


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


def make_engine(folder, *, memory_bytes=16 << 20, max_num_requests=8, max_step_tokens=512, overlap=True, caching=True):
    return build_engine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            threads=1,
            cache=CacheConfig(memory_bytes=memory_bytes, enable_prefix_caching=caching),
            scheduler=SchedulerConfig(
                max_num_requests=max_num_requests,
                max_step_tokens=max_step_tokens,
                max_model_len=MAX_LEN,
                overlap=overlap,
            ),
        )
    ).engine


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


@pytest.fixture(scope="module")
def alone(folders):
    """Each request by itself, in one chunk, without prefix cache or overlap."""
    results = {}
    for family, folder in folders.items():
        engine = make_engine(folder, overlap=False, caching=False)
        results[family] = {}
        for i in range(len(SAMPLINGS)):
            results[family] |= run(engine, [request(i)])
        engine.close()
    return results


def everything():
    return [request(i) for i in range(len(SAMPLINGS))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_step_tokens", [512, 9])
def test_mixed_and_chunked(folders, alone, family, overlap, max_step_tokens):
    engine = make_engine(folders[family], overlap=overlap, max_step_tokens=max_step_tokens)
    assert run(engine, everything()) == alone[family]
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("overlap", [False, True])
def test_after_preemption(folders, alone, family, overlap):
    # Little more than one request of MAX_LEN takes: the later ones lose their blocks again and again.
    engine = make_engine(folders[family], memory_bytes=TIGHT_BYTES[family], overlap=overlap)
    assert run(engine, everything()) == alone[family]
    assert engine.stats().preemptions > 0
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_prefix_hit(folders, alone, family):
    engine = make_engine(folders[family])
    assert run(engine, everything()) == alone[family]
    before = engine.stats().cached_tokens
    assert run(engine, everything()) == alone[family]
    assert engine.stats().cached_tokens - before >= 32 * 4
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_going_on_in_another_engine(folders, alone, family):
    for num_emitted in (1, 7, MAX_TOKENS - 1):
        engine = make_engine(folders[family])
        cut = [request(i, alone[family][str(i)].tokens[:num_emitted]) for i in range(len(SAMPLINGS))]
        outputs = run(engine, cut)
        for i, output in alone[family].items():
            assert outputs[i].tokens == output.tokens, i
            assert outputs[i].alternatives == output.alternatives[num_emitted:], i
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_options_bear_on_the_output(alone, family):
    """What is compared above is neither empty nor plain greedy."""
    outputs = alone[family]
    assert all(len(output.tokens) == MAX_TOKENS and output.finish is FinishReason.LENGTH for output in outputs.values())
    assert [len(row) for row in outputs["3"].alternatives] == [3] * MAX_TOKENS
    assert [len(row) for row in outputs["4"].alternatives] == [1] * MAX_TOKENS
    assert 80 not in outputs["4"].tokens
    assert len({tuple(output.tokens) for output in outputs.values()}) == len(SAMPLINGS)
