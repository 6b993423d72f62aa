"""The same request gives the same tokens in whatever company, chunks, cache state or incarnation it is computed.

With real (tiny, random) models, through engine, scheduler, runner and sampler.
"""

from __future__ import annotations

import pytest

from sonar.config import CacheConfig, EngineConfig, SchedulerConfig
from sonar.engine import build_engine
from sonar.messages import FinishReason
from tests.tiny import write_tiny_folder
from tests.worker.request_mix import MAX_LEN, MAX_TOKENS, SAMPLINGS, everything, request, run

# Full layers alone, sliding layers alone, and both: one or two cache groups.
FAMILIES = ("llama", "mistral", "gemma3")
# Latent blocks and grouped routing; sinks, experts with biases and two cache groups.
EXPERT_FAMILIES = ("deepseek_v3", "gpt_oss")
EVERY_FAMILY = (*FAMILIES, *EXPERT_FAMILIES)
TIGHT_BYTES = {
    "llama": 11 * 16384,
    "mistral": 10 * 16384,
    "gemma3": 9 * 4 * 8192,
    "deepseek_v3": 11 * 7168,
    "gpt_oss": 9 * 4 * 4096,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: write_tiny_folder(family, tmp_path_factory.mktemp(family)) for family in EVERY_FAMILY}


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


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_step_tokens", [512, 9])
def test_mixed_and_chunked(folders, alone, family, overlap, max_step_tokens):
    engine = make_engine(folders[family], overlap=overlap, max_step_tokens=max_step_tokens)
    assert run(engine, everything()) == alone[family]
    engine.close()


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("overlap", [False, True])
def test_after_preemption(folders, alone, family, overlap):
    # Little more than one request of MAX_LEN takes: the later ones lose their blocks again and again.
    engine = make_engine(folders[family], memory_bytes=TIGHT_BYTES[family], overlap=overlap)
    assert run(engine, everything()) == alone[family]
    assert engine.stats().preemptions > 0
    engine.close()


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_with_a_prefix_hit(folders, alone, family):
    engine = make_engine(folders[family])
    assert run(engine, everything()) == alone[family]
    before = engine.stats().cached_tokens
    assert run(engine, everything()) == alone[family]
    assert engine.stats().cached_tokens - before >= 32 * 4
    engine.close()


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_going_on_in_another_engine(folders, alone, family):
    for num_emitted in (1, 7, MAX_TOKENS - 1):
        engine = make_engine(folders[family])
        cut = [request(i, alone[family][str(i)].tokens[:num_emitted]) for i in range(len(SAMPLINGS))]
        outputs = run(engine, cut)
        for i, output in alone[family].items():
            assert outputs[i].tokens == output.tokens, i
            assert outputs[i].alternatives == output.alternatives[num_emitted:], i
        engine.close()


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_options_bear_on_the_output(alone, family):
    """What is compared above is neither empty nor plain greedy."""
    outputs = alone[family]
    assert all(len(output.tokens) == MAX_TOKENS and output.finish is FinishReason.LENGTH for output in outputs.values())
    assert [len(row) for row in outputs["3"].alternatives] == [3] * MAX_TOKENS
    assert [len(row) for row in outputs["4"].alternatives] == [1] * MAX_TOKENS
    assert 80 not in outputs["4"].tokens
    assert len({tuple(output.tokens) for output in outputs.values()}) == len(SAMPLINGS)
