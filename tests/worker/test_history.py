"""The token history against a dictionary of lists."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonar.messages import AdmittedRequest
from sonar.sampling_params import SamplingParams
from sonar.worker.history import PAGE, TokenHistory

CPU = torch.device("cpu")
NUM_SLOTS = 5
MAX_LEN = 4 * PAGE


def admitted(slot, tokens):
    return AdmittedRequest(slot=slot, token_ids=tokens, prompt_len=1, sampling=SamplingParams(seed=0))


def arrays(*columns):
    return tuple(np.array(column, dtype=np.int64) for column in columns)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, NUM_SLOTS - 1), st.integers(1, MAX_LEN)),
        st.tuples(st.just("release"), st.integers(0, NUM_SLOTS - 1), st.just(0)),
        st.tuples(st.just("draw"), st.integers(0, NUM_SLOTS - 1), st.integers(1, 40)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(operations)
def test_history_holds_what_was_written(steps):
    history, model, counter = TokenHistory(NUM_SLOTS, MAX_LEN, CPU), {}, 0
    for kind, slot, size in steps:
        if kind == "admit":
            model[slot] = list(range(counter, counter + size))
            counter += size
            history.admit([admitted(slot, model[slot])])
        elif kind == "release":
            model.pop(slot, None)
            history.release(slot)
        else:
            for _ in range(size):
                drawers = [s for s in model if len(model[s]) <= MAX_LEN]
                if not drawers:
                    break
                slots, positions = arrays(drawers, [len(model[s]) for s in drawers])
                history.reserve(slots, positions)
                tokens = torch.arange(counter, counter + len(drawers))
                history.write(torch.from_numpy(history.flat_index(slots, positions)), tokens)
                for s, token in zip(drawers, tokens.tolist()):
                    model[s].append(token)
                counter += len(drawers)
        held = sum(-(-len(tokens) // PAGE) for tokens in model.values())
        assert history.num_free_pages + held == history.num_pages
    for slot, tokens in model.items():
        slots, positions = arrays([slot] * len(tokens), range(len(tokens)))
        assert history.read(torch.from_numpy(history.flat_index(slots, positions))).tolist() == tokens


def test_rows_gathers_whole_histories():
    history = TokenHistory(3, MAX_LEN, CPU)
    short, long = [5, 6], list(range(PAGE + 3))
    history.admit([admitted(0, short), admitted(2, long)])
    slots, lengths = arrays([2, 0], [len(long), len(short)])
    rows = history.rows(torch.from_numpy(history.page_rows(slots, lengths)))
    assert rows.shape == (2, 2 * PAGE)
    assert rows[0, : len(long)].tolist() == long
    assert rows[1, : len(short)].tolist() == short


def test_memory_follows_use_not_the_limit():
    history = TokenHistory(256, 1 << 20, CPU)
    history.admit([admitted(slot, [1, 2, 3]) for slot in range(256)])
    assert history.num_pages == 256


def test_admission_replaces_the_slot():
    history = TokenHistory(1, MAX_LEN, CPU)
    history.admit([admitted(0, list(range(3 * PAGE)))])
    history.admit([admitted(0, [9])])
    assert history.num_free_pages == history.num_pages - 1
    assert history.read(torch.from_numpy(history.flat_index(*arrays([0], [0])))).tolist() == [9]
