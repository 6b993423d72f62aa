"""An executor that computes no numbers but keeps account of every cell of the KV memory.

A token is a function of the whole history before it, and every cell holds the fingerprint of the history that ends with
its token. Each step's reads must find exactly the request's own history, so that a wrong, stale, unwritten or foreign
cell fails at the step that reads it. Called by the scheduler's tests.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from sonar.kvcache.groups import CacheGroup
from sonar.messages import Logprob, StepBatch, StepResult
from sonar.sampling_params import SamplingParams

VOCAB_SIZE = 50
EOS = 0
_MASK = (1 << 61) - 1
_STRAY = -1
"""What lies in a cell nobody has written."""


def fingerprint(before: int, token_id: int) -> int:
    """Of a history, from that of the history without its last token."""
    return ((before ^ token_id) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK


def fingerprints(token_ids: Sequence[int]) -> list[int]:
    """Of every prefix, the shortest first."""
    prints, last = [], 1
    for token_id in token_ids:
        last = fingerprint(last, token_id)
        prints.append(last)
    return prints


def draw(history: int, sampling: SamplingParams, num_output: int) -> int:
    """The next token: a pure function of history and seed, never a banned stop before min_tokens are out."""
    assert sampling.seed is not None
    token_id = (fingerprint(history, sampling.seed) >> 20) % VOCAB_SIZE
    is_stop = token_id == EOS or token_id in sampling.stop_token_ids
    if is_stop and num_output < sampling.min_tokens:
        return VOCAB_SIZE - 1
    return token_id


def row_of(history: int) -> list[Logprob]:
    """A prompt log-probability row that tells which history it was computed from."""
    return [Logprob(token_id=history % VOCAB_SIZE, logprob=-float(history % 1000), rank=1)]


class _Slot:
    def __init__(self, token_ids: list[int], prompt_len: int, sampling: SamplingParams, num_groups: int) -> None:
        self.prints = fingerprints(token_ids)
        self.token_ids = token_ids
        self.prompt_len = prompt_len
        self.sampling = sampling
        self.num_computed: int | None = None
        self.tables: list[dict[int, int]] = [{} for _ in range(num_groups)]


class FakeExecutor:
    """Owns simulated memory and slots; executes batches in order, hands results out in order.

    Args:
        max_step_tokens: no step may be larger.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        block_size: int,
        num_slots: int,
        max_step_tokens: int,
    ) -> None:
        self._groups = groups
        self._block_size = block_size
        self._num_slots = num_slots
        self._max_step_tokens = max_step_tokens
        # Flat, so that a transfer can copy it: 8 bytes a token.
        self.memory = [array("q", [_STRAY]) * (block_size * count) for count in num_blocks]
        self._slots: dict[int, _Slot] = {}
        self._next_step = 0
        self.results: deque[StepResult] = deque()
        self.num_computed_tokens = 0

    def submit(self, batch: StepBatch) -> None:
        """Checks and executes one step."""
        assert batch.step == self._next_step, f"step {batch.step} after {self._next_step - 1}"
        self._next_step += 1
        self._apply(batch)
        self._check_shape(batch)
        work = list(zip(batch.slots, batch.starts, batch.lengths))
        # The past must be in memory before this step writes: a request may not read what its own step computes for
        # another.
        for slot, start, length in work:
            self._check_reads(self._slots[slot], start, start, length)
        for slot, start, length in work:
            self._write(self._slots[slot], start, length)
        for slot, start, length in work:
            self._check_reads(self._slots[slot], start, start + length, length)
        self.num_computed_tokens += sum(batch.lengths)
        self.results.append(self._result(batch))

    def _apply(self, batch: StepBatch) -> None:
        for slot in batch.released:
            del self._slots[slot]
        for request in batch.admitted:
            assert request.slot not in self._slots, f"slot {request.slot} is taken"
            assert 0 <= request.slot < self._num_slots
            self._slots[request.slot] = _Slot(
                list(request.token_ids), request.prompt_len, request.sampling, len(self._groups)
            )
        for new in batch.new_blocks:
            table = self._slots[new.slot].tables[new.group]
            # Entries are appended: a gap is allowed only before the first.
            assert not table or new.start == max(table) + 1, f"{new} after {table}"
            for i, block in enumerate(new.block_ids):
                table[new.start + i] = block

    def _check_shape(self, batch: StepBatch) -> None:
        assert batch.slots, "an empty step"
        assert len(set(batch.slots)) == len(batch.slots), "a request twice in one step"
        assert len(batch.slots) == len(batch.starts) == len(batch.lengths) == len(batch.samples)
        ones = [length == 1 for length in batch.lengths]
        assert ones == sorted(ones, reverse=True), f"lengths of 1 come first: {batch.lengths}"
        assert min(batch.lengths) >= 1 and sum(batch.lengths) <= self._max_step_tokens
        fresh = {request.slot for request in batch.admitted}
        for slot, start in zip(batch.slots, batch.starts):
            expected = self._slots[slot].num_computed
            assert (expected is None) == (slot in fresh) and expected in (None, start), f"{slot}: {expected} -> {start}"
        assert fresh <= set(batch.slots), "admitted without work"

    def _write(self, slot: _Slot, start: int, length: int) -> None:
        assert start + length <= len(slot.prints), "a token that is not drawn yet"
        for table, memory in zip(slot.tables, self.memory):
            for position in range(start, start + length):
                block, offset = divmod(position, self._block_size)
                memory[table[block] * self._block_size + offset] = slot.prints[position]
        slot.num_computed = start + length

    def _check_reads(self, slot: _Slot, start: int, end: int, length: int) -> None:
        """Whether positions up to `end` that queries start .. start + length - 1 see hold the slot's own history."""
        size = self._block_size
        for group, table, memory in zip(self._groups, slot.tables, self.memory):
            oldest = max(0, start - group.window + 1) if group.window else 0
            position = oldest
            while position < end:
                block, offset = divmod(position, size)
                stop = min(end, (block + 1) * size)
                first = table[block] * size + offset
                cells = memory[first : first + stop - position]
                own = array("q", slot.prints[position:stop])
                assert cells == own, f"positions {position}..{stop} of {group.kind} read {cells}, history is {own}"
                position = stop

    def _result(self, batch: StepBatch) -> StepResult:
        token_ids, logprobs, prompt_logprobs = [], [], {}
        for number, start, length, samples in zip(batch.slots, batch.starts, batch.lengths, batch.samples):
            slot = self._slots[number]
            if slot.sampling.prompt_logprobs is not None:
                end = min(start + length, slot.prompt_len - 1)
                if end > start:
                    prompt_logprobs[number] = [row_of(slot.prints[p]) for p in range(start, end)]
            if samples:
                assert start + length == len(slot.prints), "drawn from a token that is not the last"
                token_id = draw(slot.prints[-1], slot.sampling, len(slot.token_ids) - slot.prompt_len)
                slot.token_ids.append(token_id)
                slot.prints.append(fingerprint(slot.prints[-1], token_id))
                token_ids.append(token_id)
                logprobs.append([] if slot.sampling.logprobs is None else [Logprob(token_id, -1.0, 1)])
        return StepResult(step=batch.step, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
