"""The sampler: every option in one mixed batch, each row as if it were alone, history that the host has not seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sonar.messages import AdmittedRequest, StepBatch
from sonar.sampling_params import SamplingParams
from sonar.worker import sampler as sampler_module
from sonar.worker.draw_plan import Vocabulary
from sonar.worker.sampler import Sampler
from sonar.worker.slots import SlotTable
from tests.worker.counting_model import argmax_sample

CPU = torch.device("cpu")
VOCAB = 23
EOS = (2,)
GREEDY = {"temperature": 0.0}
SETTINGS = [
    dict(GREEDY),
    {"seed": 5},
    dict(GREEDY, logit_bias={3: 50.0, 4: 51.0}, bad_words=((4,), (1, 3))),
    dict(GREEDY, min_tokens=4, stop_token_ids=(7, 999)),
    {"seed": 6, "repetition_penalty": 1.7},
    dict(GREEDY, presence_penalty=1.5, frequency_penalty=0.5, logprobs=2),
    {"seed": 7, "repetition_penalty": 0.8, "frequency_penalty": -1.0, "logprobs": 0},
    {"seed": 8, "top_k": 5, "logprobs": 4},
]
HISTORIES = dict(enumerate([[1, 2, 3], [4], [5, 1], [6, 6, 6], [7, 8, 9, 7], [1, 2], [3, 3, 9], [0, 1]]))


class Bench:
    """Slots with the given requests, and raw logits a step."""

    def __init__(self, which, sample=argmax_sample):
        self.which = which
        self.slots = SlotTable(num_slots=8, max_model_len=600, block_size=16, num_groups=1, device=CPU)
        admitted = [
            AdmittedRequest(
                slot=i,
                token_ids=HISTORIES[i],
                prompt_len=max(1, len(HISTORIES[i]) - 1),
                sampling=SamplingParams(**{"seed": 0, **SETTINGS[i]}),
            )
            for i in which
        ]
        batch = StepBatch(incarnation=0, step=0, slots=[], starts=[], lengths=[], samples=[], admitted=admitted)
        self.slots.apply(batch)
        self.sampler = Sampler(self.slots, sample, Vocabulary(VOCAB, EOS), CPU)

    def run(self, num_steps):
        """Tokens and logprobs of each request, step by step, no host round trip in between."""
        tokens, scores = {i: [] for i in self.which}, {i: [] for i in self.which}
        for step in range(num_steps):
            slot_ids = np.array(self.which, dtype=np.int64)
            positions = np.array([len(HISTORIES[i]) + step for i in self.which], dtype=np.int64)
            plan = self.sampler.plan(slot_ids, positions)
            self.slots.history.reserve(slot_ids, positions)
            write = torch.from_numpy(self.slots.history.flat_index(slot_ids, positions))
            drawn = self.sampler.draw(raw_logits(self.which, step), plan, write)
            for i, token in zip(self.which, drawn.token_S.tolist()):
                tokens[i].append(token)
            if plan.composition.logprobs:
                for n, row in enumerate(plan.composition.logprobs.rows):
                    kept = plan.composition.logprobs.counts[n] + 1
                    scored = [column[n].tolist() for column in drawn.logprobs]
                    scores[self.which[row]].append((scored[0][:kept], scored[1][:kept], scored[2]))
        return tokens, scores


def raw_logits(which, step):
    rows = [torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * i + step)) for i in which]
    return torch.stack(rows)


def expected_token(i, history, step):
    """The rules in plain Python, for greedy rows."""
    settings, logits = SETTINGS[i], raw_logits([i], step)[0]
    for token, bias in settings.get("logit_bias", {}).items():
        logits[token] += bias
    for word in settings.get("bad_words", ()):
        if tuple(history[len(history) - len(word) + 1 :]) == tuple(word[:-1]):
            logits[word[-1]] = -math.inf
    prompt_len = max(1, len(HISTORIES[i]) - 1)
    output = history[prompt_len:]
    if len(output) < settings.get("min_tokens", 0):
        for token in (*EOS, 7):
            logits[token] = -math.inf
    for token in range(VOCAB):
        logits[token] -= settings.get("frequency_penalty", 0.0) * output.count(token)
        logits[token] -= settings.get("presence_penalty", 0.0) * (token in output)
    return int(logits.argmax())


def test_greedy_rows_follow_the_rules():
    tokens, _ = Bench(range(8)).run(12)
    for i in (0, 2, 3, 5):
        history = list(HISTORIES[i])
        for step in range(12):
            history.append(expected_token(i, history, step))
        assert history[len(HISTORIES[i]) :] == tokens[i], i


def test_each_row_is_drawn_as_if_alone():
    mixed_tokens, mixed_scores = Bench(range(8)).run(10)
    for i in range(8):
        tokens, scores = Bench([i]).run(10)
        assert tokens[i] == mixed_tokens[i], i
        assert scores[i] == mixed_scores[i], i


def test_logprobs_are_of_the_raw_distribution():
    tokens, scores = Bench(range(8)).run(3)
    for i, count in ((5, 2), (6, 0), (7, 4)):
        for step in range(3):
            logprobs = torch.log_softmax(raw_logits([i], step)[0], dim=0)
            ids, values, rank = scores[i][step]
            best = logprobs.argsort(descending=True).tolist()
            assert ids == [tokens[i][step], *best[:count]]
            assert values == pytest.approx(logprobs[ids].tolist(), abs=1e-6)
            assert rank == best.index(tokens[i][step]) + 1


def test_a_history_of_several_pages_is_penalized_whole(monkeypatch):
    monkeypatch.setitem(HISTORIES, 4, [11] + [12] * 300 + [13])
    bench = Bench([0, 4])
    plan = bench.sampler.plan(np.array([0, 4]), np.array([3, 302]))
    logits = torch.full((2, VOCAB), 3.4)
    bench.sampler._apply_rules(logits, plan)
    assert logits[1, [11, 12, 13]].tolist() == pytest.approx([2.0] * 3)
    others = [v for v in range(VOCAB) if v not in (11, 12, 13)]
    assert logits[1, others].eq(3.4).all()
    assert logits[0].eq(3.4).all()


def test_decode_steps_of_the_same_requests_compose_once(monkeypatch):
    calls = []
    compose = sampler_module.compose
    monkeypatch.setattr(sampler_module, "compose", lambda *a: calls.append(1) or compose(*a))
    bench = Bench(range(8))
    bench.run(6)
    assert len(calls) == 1
    change = StepBatch(
        incarnation=0,
        step=0,
        slots=[],
        starts=[],
        lengths=[],
        samples=[],
        released=[0],
        admitted=[AdmittedRequest(slot=0, token_ids=[1], prompt_len=1, sampling=SamplingParams(seed=9))],
    )
    bench.slots.apply(change)
    bench.sampler.plan(np.arange(8), np.full(8, 50))
    assert len(calls) == 2


def test_keys_follow_seed_and_position_only():
    drawn = {}
    for which in ([1, 4], [4, 1, 7]):
        seen = []
        bench = Bench(which, lambda logits, s, seen=seen: seen.append(s.key_S2.clone()) or logits.argmax(dim=1))
        bench.run(2)
        for step in range(2):
            for row, i in enumerate(which):
                drawn.setdefault((i, step), []).append(seen[step][row].tolist())
    assert all(keys[0] == keys[-1] for keys in drawn.values())
    assert len({tuple(keys[0]) for keys in drawn.values()}) == len(drawn)
