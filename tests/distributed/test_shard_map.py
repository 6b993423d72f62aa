"""Every element of every tensor is owned exactly as often as it should be, whatever the sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sonar.config import LayerKind, MlaConfig, ModelConfig, MoeConfig, ParallelConfig
from sonar.distributed.shard_map import Cut, Span, make_shard_map, split
from sonar.distributed.stages import measure_stages, plan_stages
from sonar.errors import ConfigError


def model(num_kv_heads=3, group=3, inner=1536, vocab=49152, head_dim=64, num_layers=4):
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=576,
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=512,
        norm_eps=1e-5,
        activation="silu",
        layer_kinds=(LayerKind.FULL,) * num_layers,
        rope={},
    )


def owners(maps, name, dimension):
    """How often each index of a dimension is owned, and whether a rank owns one twice."""
    counts = Counter()
    for shard in maps:
        cut = shard.cut(name)
        spans = cut.rows if dimension == "rows" else (cut.columns,)
        indices = [i for span in spans for i in range(span.start, span.stop)]
        assert len(indices) == len(set(indices)), (name, shard.tp_rank)
        counts.update(indices)
    return counts


CASES = st.tuples(
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 700), st.integers(40, 300), st.sampled_from([1, 2, 4])
)


@settings(max_examples=150, deadline=None)
@given(CASES, st.data())
def test_every_element_has_as_many_owners_as_it_should(case, data):
    num_kv_heads, group, inner, vocab, head_dim = case
    config = model(num_kv_heads, group, inner, vocab, head_dim)
    tp_size = data.draw(st.integers(1, config.num_heads))
    maps = [make_shard_map(config, tp_size, rank) for rank in range(tp_size)]
    num_query, num_kv = config.num_heads * head_dim, num_kv_heads * head_dim
    layer = "model.layers.3."
    once = {
        ("rows", f"{layer}self_attn.q_proj.weight"): num_query,
        ("rows", f"{layer}self_attn.q_proj.bias"): num_query,
        ("columns", f"{layer}self_attn.o_proj.weight"): num_query,
        ("rows", f"{layer}mlp.up_proj.weight"): inner,
        ("rows", f"{layer}mlp.gate_up_proj.weight"): 2 * inner,
        ("columns", f"{layer}mlp.down_proj.weight"): inner,
        ("rows", "transformer.h.0.mlp.c_fc.bias"): inner,
        ("columns", "transformer.h.0.mlp.c_proj.weight"): inner,
        ("rows", "model.embed_tokens.weight"): vocab,
        ("rows", "lm_head.weight"): vocab,
    }
    for (dimension, name), size in once.items():
        assert owners(maps, name, dimension) == Counter(range(size)), name
    shared = [0] * num_kv_heads
    for shard in maps:
        for head in range(shard.kv_heads.start, shard.kv_heads.stop):
            shared[head] += 1
    assert sum(shared) == max(tp_size, num_kv_heads) and min(shared) >= 1 and max(shared) - min(shared) <= 1
    expected = Counter({i: shared[i // head_dim] for i in range(num_kv)})
    assert owners(maps, f"{layer}self_attn.k_proj.weight", "rows") == expected
    fused = owners(maps, f"{layer}self_attn.qkv_proj.weight", "rows")
    for i in range(num_query):
        assert fused[i] == 1
    assert all(fused[num_query + i] == fused[num_query + num_kv + i] == expected[i] for i in range(num_kv))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 700), st.integers(0, 700), st.data())
def test_every_element_of_experts_and_latent_heads_is_owned_once(num_heads, inner, shared, data):
    moe = MoeConfig(6, 2, inner, frozenset(range(4)), shared_intermediate_size=shared)
    mla = MlaConfig(kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, q_lora_rank=24)
    config = dataclasses.replace(model(num_heads, 1, head_dim=24), moe=moe, mla=mla)
    tp_size = data.draw(st.integers(1, min(num_heads, inner)))
    maps = [make_shard_map(config, tp_size, rank) for rank in range(tp_size)]
    layer = "model.layers.2."
    once = {
        ("rows", f"{layer}mlp.experts.5.gate_proj.weight"): inner,
        ("rows", f"{layer}mlp.experts.13.up_proj.bias"): inner,
        ("columns", f"{layer}mlp.experts.0.down_proj.weight"): inner,
        ("rows", f"{layer}mlp.shared_expert.up_proj.weight"): shared,
        ("columns", f"{layer}mlp.shared_experts.down_proj.weight"): shared,
        ("rows", f"{layer}self_attn.q_proj.weight"): num_heads * 24,
        ("rows", f"{layer}self_attn.q_b_proj.weight"): num_heads * 24,
        ("rows", f"{layer}self_attn.kv_b_proj.weight"): num_heads * 28,
        ("columns", f"{layer}self_attn.o_proj.weight"): num_heads * 12,
        ("rows", f"{layer}self_attn.sinks"): num_heads,
    }
    for (dimension, name), size in once.items():
        assert owners(maps, name, dimension) == Counter(range(size)), name
    whole = ("mlp.gate.weight", "mlp.gate.bias", "mlp.gate.e_score_correction_bias", "mlp.shared_expert_gate.weight")
    for name in (*whole, "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"):
        assert all(shard.cut(layer + name) == Cut() for shard in maps), name
    biases = [shard.cut(f"{layer}mlp.experts.1.down_proj.bias").is_zero for shard in maps]
    assert biases == [False] + [True] * (tp_size - 1)
    sizes = [shard.local_config().moe for shard in maps]
    assert sum(part.intermediate_size for part in sizes) == inner
    assert sum(part.shared_intermediate_size for part in sizes) == shared
    assert all(shard.local_config().cache_shape == (1, 1, 28) for shard in maps)


def test_more_ranks_than_features_of_an_expert_are_refused():
    config = dataclasses.replace(model(4, 1), moe=MoeConfig(4, 1, 3, frozenset({0})))
    with pytest.raises(ConfigError, match="experts of 3 features"):
        make_shard_map(config, 4, 0)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_query_heads_meet_their_kv_head(num_kv_heads, group, data):
    config = model(num_kv_heads, group)
    tp_size = data.draw(st.integers(1, config.num_heads))
    sizes = []
    for rank in range(tp_size):
        shard = make_shard_map(config, tp_size, rank)
        local = shard.local_config()
        assert local.num_heads >= 1 and local.num_heads % local.num_kv_heads == 0
        local_group = local.num_heads // local.num_kv_heads
        for i in range(local.num_heads):
            assert (shard.heads.start + i) // group == shard.kv_heads.start + i // local_group
        sizes.append(local.num_heads)
    assert max(sizes) - min(sizes) <= (group if tp_size <= num_kv_heads else -(-group // (tp_size // num_kv_heads)))


def test_biases_of_summed_outputs_are_added_once():
    for name in ("model.layers.0.self_attn.o_proj.bias", "transformer.h.0.mlp.c_proj.bias"):
        cuts = [make_shard_map(model(), 3, rank).cut(name) for rank in range(3)]
        assert [cut.is_zero for cut in cuts] == [False, True, True]
        assert all(cut.rows is None and cut.columns is None for cut in cuts)


def test_norms_and_positions_are_whole():
    shard = make_shard_map(model(), 3, 1)
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "transformer.wpe.weight", "rope_freqs"):
        cut = shard.cut(name)
        assert cut.rows is None and cut.columns is None and not cut.is_zero, name


def test_columns_are_cut_at_blocks_of_quantized_formats():
    assert [make_shard_map(model(), 3, rank).inner for rank in range(3)] == [(0, 512), (512, 1024), (1024, 1536)]
    assert make_shard_map(model(inner=14336), 3, 0).inner == (0, 19 * 256)
    assert make_shard_map(model(inner=112), 4, 3).inner == (84, 112)


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(ConfigError, match="at most 9"):
        make_shard_map(model(), 10, 0)


@given(st.integers(0, 400), st.integers(1, 9))
def test_split_is_whole_and_even(count, parts):
    spans = [split(count, parts, index) for index in range(parts)]
    assert spans[0].start == 0 and spans[-1].stop == count
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    assert max(s.size for s in spans) - min(s.size for s in spans) <= 1
    assert Span(1, 3).times(4) == (4, 12)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 120), st.integers(0, 120), st.data())
def test_stages_are_whole_and_the_heaviest_is_as_light_as_can_be(sizes, first, last, data):
    num_stages = data.draw(st.integers(1, min(4, len(sizes))))
    config = model(num_layers=len(sizes))
    stages = plan_stages(config, ParallelConfig(pp_size=num_stages), sizes, first, last)
    assert [layer for a, b in stages for layer in range(a, b)] == list(range(len(sizes)))

    def heaviest(ends):
        starts = [0, *ends[:-1]]
        loads = [sum(sizes[a:b]) for a, b in zip(starts, ends)]
        loads[0] += first
        loads[-1] += last
        return max(loads)

    def all_ends(start, left):
        if left == 1:
            yield [len(sizes)]
            return
        for end in range(start + 1, len(sizes) - left + 2):
            for rest in all_ends(end, left - 1):
                yield [end, *rest]

    best = min(heaviest(ends) for ends in all_ends(0, num_stages))
    assert heaviest([b for _, b in stages]) == best


def test_given_stages_are_taken_or_refused():
    config = model(num_layers=5)
    given_layers = ParallelConfig(pp_size=2, pp_layers=(1, 4))
    assert plan_stages(config, given_layers, [1] * 5, 0, 0) == ((0, 1), (1, 5))
    with pytest.raises(ConfigError, match="4 of 5 layers"):
        plan_stages(config, ParallelConfig(pp_size=2, pp_layers=(2, 2)), [1] * 5, 0, 0)
    with pytest.raises(ConfigError, match="at most 5"):
        plan_stages(config, ParallelConfig(pp_size=6), [1] * 5, 0, 0)
    with pytest.raises(ConfigError, match="pp_layers"):
        ParallelConfig(pp_size=2, pp_layers=(5,))


def test_sizes_are_those_of_the_checkpoint_and_count_what_a_step_reads():
    config = model(num_layers=2)
    stored = {
        f"model.layers.{i}.{part}": 10 for i in range(3) for part in ("mlp.up_proj.weight", "input_layernorm.weight")
    }
    stored |= {"model.embed_tokens.weight": 70, "lm_head.weight": 90, "model.norm.weight": 1}
    assert measure_stages(config, stored) == ([20, 20], 0, 90)
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert measure_stages(tied, stored) == ([20, 20], 0, 70)
    gpt2 = {"transformer.h.1.attn.c_attn.weight": 5, "transformer.wte.weight": 3}
    assert measure_stages(tied, gpt2) == ([0, 5], 0, 3)
    layers, first, last = measure_stages(config, {})
    assert layers == [576 * (24 * 64 + 3 * 1536)] * 2 and (first, last) == (0, 576 * 49152)
