"""Step inputs against a token-by-token construction."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonar.config import LayerKind
from sonar.kvcache.groups import CacheGroup
from sonar.messages import AdmittedRequest, NewBlocks, StepBatch
from sonar.sampling_params import SamplingParams
from sonar.worker.input_builder import InputBuilder
from sonar.worker.inputs import build_inputs, plan_step
from sonar.worker.kv_cache import CacheLayout, KVCache
from sonar.worker.slots import SlotTable

CPU = torch.device("cpu")
BLOCK = 4
MAX_LEN = 40
NUM_SLOTS = 6


def make_cache():
    groups = (CacheGroup(LayerKind.SLIDING, (0, 2), 8), CacheGroup(LayerKind.FULL, (1,)))
    return KVCache(CacheLayout(groups, 1, 2, BLOCK, torch.float32), (200, 300), CPU)


@st.composite
def steps(draw):
    slots = draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(1, NUM_SLOTS))]
    rows = []
    for slot in slots:
        known = draw(st.integers(2, MAX_LEN))
        start = draw(st.integers(0, known - 1))
        length = draw(st.one_of(st.just(1), st.integers(1, known - start)))
        prompt_len = draw(st.integers(1, known))
        rows.append((slot, known, start, length, prompt_len, draw(st.booleans()), draw(st.booleans())))
    rows.sort(key=lambda row: row[3] > 1)
    return rows


def tokens_of(slot, known):
    return [slot * 100 + p for p in range(known)]


def blocks_of(slot, group):
    return [group * 150 + slot * 11 + i for i in range(-(-MAX_LEN // BLOCK))]


def build(rows):
    slots = SlotTable(num_slots=NUM_SLOTS, max_model_len=MAX_LEN, block_size=BLOCK, num_groups=2, device=CPU)
    batch = StepBatch(
        incarnation=0,
        step=0,
        slots=[row[0] for row in rows],
        starts=[row[2] for row in rows],
        lengths=[row[3] for row in rows],
        samples=[row[5] for row in rows],
        admitted=[
            AdmittedRequest(
                slot=slot,
                token_ids=tokens_of(slot, known),
                prompt_len=prompt_len,
                sampling=SamplingParams(seed=1, prompt_logprobs=1 if scores else None),
            )
            for slot, known, _, _, prompt_len, _, scores in rows
        ],
        new_blocks=[NewBlocks(row[0], group, 0, blocks_of(row[0], group)) for row in rows for group in range(2)],
    )
    slots.apply(batch)
    cache = make_cache()
    return build_inputs(plan_step(batch, slots, BLOCK), slots, cache, CPU), slots, cache


@settings(max_examples=80, deadline=None)
@given(steps())
def test_inputs_equal_a_token_by_token_construction(rows):
    inputs, slots, cache = build(rows)
    tokens, positions, mapping = [], [], ([], [])
    query_start, sampled, prompt = [0], [], []
    for slot, known, start, length, prompt_len, samples, scores in rows:
        for position in range(start, start + length):
            tokens.append(tokens_of(slot, known)[position])
            positions.append(position)
            for group in range(2):
                mapping[group].append(blocks_of(slot, group)[position // BLOCK] * BLOCK + position % BLOCK)
            if scores and position + 1 < prompt_len:
                prompt.append((slot, len(tokens) - 1, tokens_of(slot, known)[position + 1]))
        query_start.append(len(tokens))
        if samples:
            sampled.append((slot, start + length, len(tokens) - 1))
    forward = inputs.forward
    assert forward.token_ids_T.tolist() == tokens
    assert forward.positions_T.tolist() == positions
    assert [len(forward.kv_layers), len(forward.attention)] == [3, 3]
    assert forward.attention[0] is forward.attention[2]
    for layer, group in enumerate((0, 1, 0)):
        metadata = forward.attention[layer]
        assert forward.kv_layers[layer].data_ptr() == cache.layers[layer].data_ptr()
        assert metadata.slot_mapping_T.tolist() == mapping[group]
        assert metadata.query_start_R1.tolist() == query_start
        assert metadata.seq_lens_R.tolist() == [row[2] + row[3] for row in rows]
        assert metadata.num_decodes == sum(row[3] == 1 for row in rows)
        assert metadata.max_query_len == max(row[3] for row in rows)
        assert metadata.max_seq_len == max(row[2] + row[3] for row in rows)
        width = -(-metadata.max_seq_len // BLOCK)
        assert metadata.block_table_RB.tolist() == [blocks_of(row[0], group)[:width] for row in rows]
        kinds = (metadata.block_table_RB.dtype, metadata.slot_mapping_T.dtype, metadata.seq_lens_R.dtype)
        assert kinds == (torch.int32, torch.int64, torch.int32)
    assert inputs.sampled_slots.tolist() == [slot for slot, _, _ in sampled]
    assert inputs.sampled_positions.tolist() == [position for _, position, _ in sampled]
    sampled_rows = list(range(len(tokens))) if inputs.sampled_rows_S is None else inputs.sampled_rows_S.tolist()
    assert sampled_rows == [row for _, _, row in sampled]
    assert forward.logits_rows_S.tolist() == sampled_rows + [row for _, row, _ in prompt]
    if not prompt:
        assert inputs.prompt is None
    else:
        assert inputs.prompt.rows_Q.tolist() == [row for _, row, _ in prompt]
        assert slots.history.read(inputs.prompt.targets_Q).tolist() == [token for _, _, token in prompt]
        owners = [s for s, count in zip(inputs.prompt.slots, inputs.prompt.counts) for _ in range(count)]
        assert owners == [slot for slot, _, _ in prompt]


def test_a_drawn_token_is_read_without_the_host():
    inputs, slots, cache = build([(2, 5, 4, 1, 5, True, False)])
    slots.history.reserve(inputs.sampled_slots, inputs.sampled_positions)
    place = slots.history.flat_index(inputs.sampled_slots, inputs.sampled_positions)
    slots.history.write(torch.from_numpy(place), torch.tensor([777]))
    batch = StepBatch(incarnation=0, step=1, slots=[2], starts=[5], lengths=[1], samples=[True])
    assert InputBuilder(slots, cache, CPU).build(batch).forward.token_ids_T.tolist() == [777]
    assert np.array_equal(inputs.sampled_positions, [5])


def as_lists(inputs):
    """Everything a step reads, comparable."""
    forward = inputs.forward
    attention = [
        [
            m.block_table_RB,
            m.slot_mapping_T,
            m.query_start_R1,
            m.seq_lens_R,
            m.num_decodes,
            m.max_query_len,
            m.max_seq_len,
        ]
        for m in forward.attention
    ]
    flat = [
        forward.token_ids_T,
        forward.positions_T,
        forward.logits_rows_S,
        *(value for row in attention for value in row),
        inputs.write_S,
    ]
    flat += [inputs.sampled_slots, inputs.sampled_positions]
    return [value if isinstance(value, int) else value.tolist() for value in flat]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=NUM_SLOTS), st.integers(1, 30), st.data())
def test_a_run_of_decode_steps_equals_steps_made_anew(lengths, num_steps, data):
    """Blocks arrive one by one, just when they are needed; drawn tokens are written as the sampler would."""
    slots = SlotTable(num_slots=NUM_SLOTS, max_model_len=64, block_size=BLOCK, num_groups=2, device=CPU)
    cache = make_cache()
    builder = InputBuilder(slots, cache, CPU)
    ids = data.draw(st.permutations(range(NUM_SLOTS)))[: len(lengths)]
    changes = {
        "admitted": [
            AdmittedRequest(slot=s, token_ids=tokens_of(s, n), prompt_len=1, sampling=SamplingParams(seed=1))
            for s, n in zip(ids, lengths)
        ],
        "new_blocks": [
            NewBlocks(s, g, 0, blocks_of(s, g)[: (n - 1) // BLOCK]) for s, n in zip(ids, lengths) for g in range(2)
        ],
    }
    for number in range(num_steps):
        starts = [n - 1 + number for n in lengths]
        fresh_blocks = [
            NewBlocks(s, g, start // BLOCK, [g * 150 + s * 20 + start // BLOCK])
            for s, start in zip(ids, starts)
            for g in range(2)
            if start % BLOCK == 0 or number == 0
        ]
        changes["new_blocks"] = [*changes.get("new_blocks", []), *fresh_blocks]
        batch = StepBatch(
            incarnation=0,
            step=number,
            slots=list(ids),
            starts=starts,
            lengths=[1] * len(ids),
            samples=[True] * len(ids),
            **changes,
        )
        slots.apply(batch)
        inputs = builder.build(batch)
        assert as_lists(inputs) == as_lists(build_inputs(plan_step(batch, slots, BLOCK), slots, cache, CPU))
        slots.history.write(inputs.write_S, torch.arange(len(ids)) + 1000 * number)
        changes = {}


def test_a_run_ends_when_the_batch_changes():
    inputs, slots, cache = build([(2, 5, 4, 1, 5, True, False), (3, 7, 6, 1, 5, True, False)])
    builder = InputBuilder(slots, cache, CPU)
    for step, (ids, starts) in enumerate([([2, 3], [4, 6]), ([2, 3], [5, 7]), ([3], [8]), ([3, 2], [9, 6])]):
        count = len(ids)
        batch = StepBatch(
            incarnation=0, step=step, slots=ids, starts=starts, lengths=[1] * count, samples=[True] * count
        )
        inputs = builder.build(batch)
        assert inputs.forward.positions_T.tolist() == starts
        assert inputs.sampled_slots.tolist() == ids
        assert as_lists(inputs) == as_lists(build_inputs(plan_step(batch, slots, BLOCK), slots, cache, CPU))
