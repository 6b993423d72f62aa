"""Slots: order of a step's changes, options read from settings, block tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonar.messages import AdmittedRequest, NewBlocks, StepBatch
from sonar.sampling_params import SamplingParams
from sonar.worker.slots import Option, SlotTable, options_of

CPU = torch.device("cpu")


def make_slots(num_slots=4, groups=1):
    return SlotTable(num_slots=num_slots, max_model_len=64, block_size=4, num_groups=groups, device=CPU)


def make_batch(**changes):
    return StepBatch(incarnation=0, step=0, slots=[], starts=[], lengths=[], samples=[], **changes)


def request(slot, tokens, **sampling):
    return AdmittedRequest(
        slot=slot, token_ids=tokens, prompt_len=len(tokens), sampling=SamplingParams(**{"seed": 1, **sampling})
    )


def read(slots, slot, count):
    index = slots.history.flat_index(np.full(count, slot, dtype=np.int64), np.arange(count, dtype=np.int64))
    return slots.history.read(torch.from_numpy(index)).tolist()


def test_release_applies_before_admission_and_admission_before_blocks():
    slots = make_slots()
    slots.apply(make_batch(admitted=[request(1, [7, 8])], new_blocks=[NewBlocks(1, 0, 0, [5])]))
    slots.apply(make_batch(released=[1], admitted=[request(1, [3, 4, 5])], new_blocks=[NewBlocks(1, 0, 0, [9])]))
    assert read(slots, 1, 3) == [3, 4, 5]
    assert slots.prompt_len[1] == 3
    one = np.array([1], dtype=np.int64)
    assert slots.block_tables.lookup(0, one, np.array([0])).tolist() == [9]


def test_block_tables_of_groups_are_apart():
    slots = make_slots(groups=2)
    slots.apply(make_batch(admitted=[request(0, [1]), request(3, [1])]))
    slots.apply(make_batch(new_blocks=[NewBlocks(3, 0, 0, [1, 2]), NewBlocks(3, 1, 1, [8]), NewBlocks(0, 1, 0, [4])]))
    rows = np.array([3, 0], dtype=np.int64)
    assert slots.block_tables.gather(0, rows, torch.from_numpy(rows), 2).tolist() == [[1, 2], [0, 0]]
    assert slots.block_tables.gather(1, rows, torch.from_numpy(rows), 2).tolist() == [[0, 8], [4, 0]]


def test_a_table_that_outgrows_its_width_is_an_invariant_error():
    with pytest.raises(AssertionError, match="slot 0 grows to 18 blocks of 17"):
        make_slots().apply(make_batch(new_blocks=[NewBlocks(0, 0, 17, [1])]))


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        ({"temperature": 0.0}, Option(0)),
        ({"temperature": 0.0, "top_p": 0.5}, Option(0)),
        ({}, Option.SAMPLED),
        ({"top_k": -1, "top_p": 1.0}, Option.SAMPLED),
        ({"top_k": 3}, Option.SAMPLED | Option.FILTER),
        ({"min_p": 0.1}, Option.SAMPLED | Option.FILTER),
        ({"typical_p": 0.9}, Option.SAMPLED | Option.FILTER),
        ({"temperature": 0.0, "repetition_penalty": 1.2}, Option.REPETITION),
        ({"temperature": 0.0, "presence_penalty": -0.5}, Option.COUNTS),
        ({"temperature": 0.0, "frequency_penalty": 0.5, "min_tokens": 2}, Option.COUNTS | Option.MIN_TOKENS),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}, "bad_words": ((4,),)}, Option.BIAS | Option.BAD_WORDS),
        ({"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0}, Option.LOGPROBS | Option.PROMPT_LOGPROBS),
    ],
)
def test_options_name_what_a_request_needs(sampling, options):
    assert options_of(SamplingParams(**sampling)) == options


def test_version_grows_with_admissions_only():
    slots = make_slots()
    slots.apply(make_batch(admitted=[request(0, [1])]))
    assert slots.version == 1
    slots.apply(make_batch(released=[0], new_blocks=[NewBlocks(0, 0, 0, [1])]))
    assert slots.version == 1


def test_a_request_without_a_seed_is_our_fault():
    with pytest.raises(AssertionError, match="with its seed"):
        make_slots().apply(make_batch(admitted=[request(0, [1], seed=None)]))
