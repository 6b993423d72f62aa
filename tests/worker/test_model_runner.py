"""The runner with a model of exact integers: any order of the same work gives the same tokens, to the bit."""

from __future__ import annotations

import threading

import pytest
import torch

from sonar.messages import AdmittedRequest, NewBlocks, StepBatch
from sonar.sampling_params import SamplingParams
from sonar.worker import model_runner
from sonar.worker.draw_plan import Vocabulary
from sonar.worker.kv_cache import CacheLayout, KVCache
from sonar.worker.model_runner import ModelRunner, RunnerParts
from sonar.worker.slots import SlotTable
from tests.worker.counting_model import VOCAB, CountingModel, argmax_sample

CPU = torch.device("cpu")
BLOCK = 4
MAX_LEN = 96
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 3},
    "penalties": {"seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.1},
    "words": {"temperature": 0.0, "bad_words": tuple((a, b) for a in range(6) for b in range(0, VOCAB, 2))},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
}


def make_runner(model=None, windows=(0, 8)):
    model = model or CountingModel(windows, BLOCK)
    cache = KVCache(CacheLayout(model.groups, 1, 2, BLOCK, torch.float32), (256,) * len(model.groups), CPU)
    slots = SlotTable(num_slots=8, max_model_len=MAX_LEN, block_size=BLOCK, num_groups=len(model.groups), device=CPU)
    return ModelRunner(RunnerParts(model, cache, slots, argmax_sample, Vocabulary(VOCAB, (0,)), CPU, threads=1))


def blocks(slot, groups=2):
    count = MAX_LEN // BLOCK
    return [NewBlocks(slot, g, 0, [slot * count + i for i in range(count)]) for g in range(groups)]


def admit(slot, tokens, **sampling):
    return AdmittedRequest(
        slot=slot, token_ids=tokens, prompt_len=len(tokens), sampling=SamplingParams(**{"seed": 0, **sampling})
    )


def step(number, work, **changes):
    """work: (slot, start, length, samples)."""
    work = sorted(work, key=lambda w: w[2] > 1)
    columns = list(zip(*work)) or [[]] * 4
    names = ("slots", "starts", "lengths", "samples")
    return StepBatch(incarnation=0, step=number, **dict(zip(names, map(list, columns))), **changes)


def generate(requests, num_tokens, chunk, overlap):
    """Runs requests {slot: (prompt, sampling)} together, prompts cut in chunks; returns {slot: (tokens, logprobs)}."""
    runner = make_runner()
    computed = dict.fromkeys(requests, 0)
    out = {slot: ([], []) for slot in requests}
    pending = []
    changes = {
        "admitted": [admit(slot, prompt, **sampling) for slot, (prompt, sampling) in requests.items()],
        "new_blocks": [new for slot in requests for new in blocks(slot)],
    }

    def collect():
        owners, handle = pending.pop(0)
        result = handle.result()
        for i, slot in enumerate(owners):
            out[slot][0].append(result.token_ids[i])
            out[slot][1].append(result.logprobs[i] if result.logprobs else [])

    number = 0
    while True:
        work = []
        for slot, (prompt, _) in requests.items():
            start, total = computed[slot], len(prompt) + num_tokens - 1
            if start < total:
                length = min(chunk, len(prompt) - start) if start < len(prompt) else 1
                work.append((slot, start, length, start + length >= len(prompt)))
                computed[slot] = start + length
        if not work:
            break
        work.sort(key=lambda w: w[2] > 1)
        pending.append(([w[0] for w in work if w[3]], runner.submit(step(number, work, **changes))))
        changes, number = {}, number + 1
        if len(pending) > overlap:
            collect()
    while pending:
        collect()
    runner.close()
    return out


REQUESTS = {
    slot: ([(slot * 7 + p * p) % VOCAB for p in range(5 + 6 * slot)], sampling)
    for slot, sampling in enumerate(SAMPLINGS.values())
}


@pytest.fixture(scope="module")
def alone():
    return {slot: generate({slot: request}, 24, 1000, overlap=0)[slot] for slot, request in REQUESTS.items()}


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_mixed_batches_give_what_each_request_gives_alone(alone, chunk, overlap):
    assert generate(REQUESTS, 24, chunk, overlap) == alone


def test_the_requests_differ_from_plain_greedy(alone):
    """The options have an effect here, or the test above would prove little."""
    for slot in (1, 2, 3):
        prompt = REQUESTS[slot][0]
        assert generate({slot: (prompt, SAMPLINGS["greedy"])}, 24, 1000, 0)[slot][0] != alone[slot][0]
    assert all(len(row) == 4 and row[0].rank == 1 for row in alone[4][1])


def test_a_readmitted_request_goes_on_exactly(alone):
    for slot, (prompt, sampling) in REQUESTS.items():
        tokens = alone[slot][0]
        runner = make_runner()
        known = prompt + tokens[:9]
        seated = AdmittedRequest(
            slot=6, token_ids=known, prompt_len=len(prompt), sampling=SamplingParams(**{"seed": 0, **sampling})
        )
        work = [(6, 0, len(known), True)]
        drawn = runner.submit(step(0, work, admitted=[seated], new_blocks=blocks(6))).result().token_ids
        for i in range(len(known), len(prompt) + 23):
            drawn += runner.submit(step(i, [(6, i, 1, True)])).result().token_ids
        assert tokens[:9] + drawn == tokens
        runner.close()


@pytest.mark.parametrize(("chunk", "rows_at_once"), [(2, 256), (5, 2), (64, 3), (64, 256)])
def test_prompt_logprobs_cover_the_prompt_from_its_second_token(monkeypatch, chunk, rows_at_once):
    monkeypatch.setattr(model_runner, "_PROMPT_ROWS", rows_at_once)
    prompt = [(3 * p) % VOCAB for p in range(11)]
    runner = make_runner()
    plain = generate({0: (prompt, {"temperature": 0.0, "logprobs": 2})}, 1, 1000, 0)[0]
    changes = {"admitted": [admit(0, prompt, temperature=0.0, prompt_logprobs=2)], "new_blocks": blocks(0)}
    rows, tokens = [], []
    for start in range(0, len(prompt), chunk):
        length = min(chunk, len(prompt) - start)
        batch = step(start, [(0, start, length, start + length == len(prompt))], **changes)
        result = runner.submit(batch).result()
        rows += result.prompt_logprobs.get(0, [])
        tokens += result.token_ids
        changes = {}
    assert tokens == plain[0]
    assert [row[0].token_id for row in rows] == prompt[1:]
    for p, row in enumerate(rows):
        truncated = generate({0: (prompt[: p + 1], {"temperature": 0.0, "logprobs": 2})}, 1, 1000, 0)[0]
        assert row[1:] == truncated[1][0][1:]
        assert [entry.rank for entry in row[1:]] == [1, 2]
    runner.close()


def test_copied_blocks_are_read_like_their_source():
    prompt = list(range(8))
    runner = make_runner()
    first = step(0, [(0, 0, 8, True)], admitted=[admit(0, prompt, temperature=0.0)], new_blocks=blocks(0))
    expected = runner.submit(first).result().token_ids
    copies = [(group, source, source + 200) for group in range(2) for source in (0, 1)]
    tables = [NewBlocks(1, group, 0, [200, 201]) for group in range(2)]
    twin = admit(1, prompt, temperature=0.0)
    batch = step(1, [(1, 7, 1, True)], admitted=[twin], new_blocks=tables, copies=copies)
    assert runner.submit(batch).result().token_ids == expected
    runner.close()


def test_a_step_that_only_changes_slots_is_computed():
    runner = make_runner()
    result = runner.submit(step(4, [], released=[3])).result()
    assert (result.step, result.token_ids) == (4, [])
    runner.close()


class FailingModel(CountingModel):
    def forward(self, batch):
        if len(self.batches) == 1:
            raise ArithmeticError("layer 3")
        return super().forward(batch)


def test_what_a_step_raises_comes_out_of_its_result_and_of_all_later_ones():
    runner = make_runner(FailingModel((0, 8), BLOCK))
    changes = {"admitted": [admit(0, [1, 2], temperature=0.0)], "new_blocks": blocks(0)}
    assert len(runner.submit(step(0, [(0, 0, 2, True)], **changes)).result().token_ids) == 1
    failing = runner.submit(step(1, [(0, 2, 1, True)]))
    after = runner.submit(step(2, [(0, 3, 1, True)]))
    with pytest.raises(ArithmeticError, match="layer 3"):
        failing.result()
    with pytest.raises(ArithmeticError, match="layer 3"):
        after.result()
    runner.close()


class GatedModel(CountingModel):
    gate = threading.Event()

    def forward(self, batch):
        assert self.gate.wait(10)
        return super().forward(batch)


class NotANumberModel(CountingModel):
    def logits(self, hidden_SD):
        logits_SV = super().logits(hidden_SD)
        logits_SV[0] = float("nan")
        return logits_SV


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 3}])
def test_a_row_that_is_not_a_number_gets_no_token_and_spoils_no_other(sampling):
    runner = make_runner(NotANumberModel((0, 8), BLOCK))
    changes = {"admitted": [admit(0, [1, 2], **sampling), admit(1, [3, 4], **sampling)]}
    changes["new_blocks"] = blocks(0) + blocks(1)
    first = runner.submit(step(0, [(0, 0, 2, True), (1, 0, 2, True)], **changes))
    second = runner.submit(step(1, [(0, 2, 1, True), (1, 2, 1, True)]))
    for result in (first.result(), second.result()):
        assert result.token_ids[0] == -1 and 0 <= result.token_ids[1] < VOCAB
    runner.close()


def test_two_steps_may_be_under_way_and_not_three():
    model = GatedModel((0, 8), BLOCK)
    runner = make_runner(model)
    changes = {"admitted": [admit(0, [1, 2], temperature=0.0)], "new_blocks": blocks(0)}
    handles = [runner.submit(step(0, [(0, 0, 2, True)], **changes)), runner.submit(step(1, [(0, 2, 1, True)]))]
    with pytest.raises(AssertionError, match="2 steps are under way"):
        runner.submit(step(2, [(0, 3, 1, True)]))
    model.gate.set()
    assert [len(handle.result().token_ids) for handle in handles] == [1, 1]
    runner.close()
