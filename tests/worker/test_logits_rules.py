"""Logits rules against plain Python over lists."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sonar.worker.logits_rules import (
    BadWords,
    Entries,
    PenaltyRows,
    PenaltyStages,
    add_bias,
    ban,
    ban_bad_words,
    penalize,
)

VOCAB = 11


def make_logits(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_bias_and_bans_touch_their_entries_only():
    logits = make_logits(3)
    expected = logits.clone()
    expected[0, 4] += 2.5
    expected[2, 1] += -100.0
    expected[1, 10] = -math.inf
    expected[1, 0] = -math.inf
    add_bias(logits, Entries(torch.tensor([0, 2]), torch.tensor([4, 1])), torch.tensor([2.5, -100.0]))
    ban(logits, Entries(torch.tensor([1, 1, 1]), torch.tensor([10, 0, 0])))
    assert torch.equal(logits, expected)


def test_bad_words_ban_the_last_token_after_their_beginning():
    # Row 0 ends in ..., 3, 4; row 1 holds one token only.
    words = [(0, [3, 4, 5]), (0, [9, 4, 6]), (0, [4, 7]), (0, [8]), (1, [2, 1]), (1, [0, 2, 3]), (1, [9, 2, 1])]
    prefix = torch.tensor([[-1] * (2 - len(w[:-1])) + w[:-1] for _, w in words])
    rules = BadWords(torch.tensor([r for r, _ in words]), torch.tensor([w[-1] for _, w in words]), prefix)
    tails = {0: [3, 4], 1: [-2, 2]}
    logits = make_logits(2)
    expected = logits.clone()
    for row, token in ((0, 5), (0, 7), (0, 8), (1, 1)):
        expected[row, token] = -math.inf
    ban_bad_words(logits, rules, torch.tensor([tails[r] for r, _ in words]))
    assert torch.equal(logits, expected)


def penalized(logits, tokens, prompt_len, repetition, presence, frequency):
    """One row, token by token, in float32 as torch computes it."""
    row = logits.clone()
    for token in set(tokens):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    output = tokens[prompt_len:]
    for token in range(VOCAB):
        row[token] -= torch.tensor(float(output.count(token))) * frequency
        row[token] -= torch.tensor(float(token in output)) * presence
    return row


factors = st.floats(-2, 2, width=32)
histories = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(histories, st.integers(0, 30), st.floats(0.5, 2, width=32), factors, factors), max_size=5),
    st.booleans(),
)
def test_penalties_follow_their_definition(rows, with_plain_row):
    if not rows:
        return
    columns = list(zip(*rows))
    tokens, prompt_len = columns[0], [min(p, len(t)) for p, t in zip(columns[1], columns[0])]
    total = len(rows) + with_plain_row
    row_P = torch.arange(len(rows)) + with_plain_row
    logits = make_logits(total, seed=3)
    expected = logits.clone()
    factors = [torch.tensor(column, dtype=torch.float32) for column in columns[2:]]
    for i in range(len(rows)):
        expected[row_P[i]] = penalized(logits[row_P[i]], tokens[i], prompt_len[i], *(f[i] for f in factors))
    width = max(map(len, tokens)) + 3
    padded = torch.tensor([[*t, *([VOCAB - 1] * (width - len(t)))] for t in tokens])
    rules = PenaltyRows(row_P if with_plain_row else None, torch.tensor(prompt_len), *factors)
    penalize(logits, rules, padded, torch.tensor([len(t) for t in tokens]), PenaltyStages(True, True))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    if with_plain_row:
        assert torch.equal(logits[0], make_logits(total, seed=3)[0])
