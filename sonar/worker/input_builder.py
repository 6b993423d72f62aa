"""Inputs of every step, and a short way for a run of decode steps of the same requests.

Such a step differs from the one before it by one position a request, so its arrays are the last ones plus one, except
where a request enters its next block. Python that runs once a step runs with cold caches, after the weights have passed
through them: on the demo model a numpy or torch call costs some 6 us there, ten times as much as in a loop. Called by
the model runner.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sonar.messages import StepBatch
from sonar.models.base import ForwardBatch
from sonar.ops.table import AttentionMetadata
from sonar.worker.inputs import IntArray, StepInputs, StepPlan, build_inputs, plan_step
from sonar.worker.kv_cache import KVCache
from sonar.worker.slots import SlotTable
from sonar.worker.upload import upload

# Rows of `_DecodeRun._rows`; one more for each cache group follows.
_POSITION, _HISTORY, _WRITE, _MAPPING = 0, 1, 2, 3


class InputBuilder:
    """Makes the inputs of one step after the other; owns what a run of decode steps shares.

    The inputs of a step are good until those of the next are made: on a CPU both may lie in the same memory.
    """

    def __init__(self, slots: SlotTable, cache: KVCache, device: torch.device) -> None:
        self._slots = slots
        self._cache = cache
        self._device = device
        self._run: _DecodeRun | None = None

    def build(self, batch: StepBatch) -> StepInputs:
        """Inputs of a step whose slot changes have been applied.

        Args:
            batch: at least one request; requests of length 1 come first.
        """
        if self._run is not None and self._run.goes_on(batch):
            return self._run.advance(batch)
        plan = plan_step(batch, self._slots, self._cache.layout.block_size)
        inputs = build_inputs(plan, self._slots, self._cache, self._device)
        self._run = None
        if plan.is_decode_only and inputs.prompt is None:
            self._run = _DecodeRun(batch, plan, inputs, self._slots, self._cache, self._device)
        return inputs

    def nothing(self) -> ForwardBatch:
        """Inputs of a step in which this rank has no request, for ranks that meet in every layer."""
        none_T = torch.empty(0, dtype=torch.int64, device=self._device)
        metadata = AttentionMetadata(
            block_table_RB=torch.empty((0, 1), dtype=torch.int32, device=self._device),
            slot_mapping_T=none_T,
            query_start_R1=torch.zeros(1, dtype=torch.int32, device=self._device),
            seq_lens_R=torch.empty(0, dtype=torch.int32, device=self._device),
            num_decodes=0,
            max_query_len=0,
            max_seq_len=0,
        )
        return ForwardBatch(
            token_ids_T=none_T,
            positions_T=none_T,
            kv_layers=self._cache.layers,
            attention=(metadata,) * len(self._cache.layers),
            logits_rows_S=none_T,
        )


class _DecodeRun:
    """Decode steps of the same requests in the same order.

    Holds the arrays of the latest step: `_rows` (3 + groups, R) int64 is position, place in the history, place of the
    token to draw, and place in each group's cache.
    """

    def __init__(
        self,
        batch: StepBatch,
        plan: StepPlan,
        first: StepInputs,
        slots: SlotTable,
        cache: KVCache,
        device: torch.device,
    ) -> None:
        self._batch = batch
        self._latest = first
        self._slots = slots
        self._cache = cache
        self._device = device
        self._slot_ids = plan.slots
        (self._slots_R,) = upload([plan.slots], device)
        self._rows = np.stack([plan.token_positions, plan.history, plan.write, *plan.mappings])
        self._seq_lens = plan.seq_lens.astype(np.int32)
        self._max_seq_len = int(plan.seq_lens.max())
        # On a CPU the tensors are the arrays' own memory, and so are made once.
        self._views: list[Tensor] = upload([*self._rows, self._seq_lens], device) if device.type == "cpu" else []

    def goes_on(self, batch: StepBatch) -> bool:
        """Whether a batch is the next step of this run."""
        last = self._batch
        return (
            not batch.admitted
            and not batch.released
            and batch.slots == last.slots
            and batch.lengths == last.lengths
            and batch.samples == last.samples
        )

    def advance(self, batch: StepBatch) -> StepInputs:
        """Inputs of the next step."""
        self._rows += 1
        self._seq_lens += 1
        self._max_seq_len += 1
        positions = self._rows[_POSITION]
        assert batch.starts == positions.tolist(), f"step {batch.step} starts at {batch.starts}, not at {positions}"
        next_positions = positions + 1
        # A request that enters a block, or whose drawn token will.
        (entering,) = (next_positions % self._cache.layout.block_size <= 1).nonzero()
        if len(entering):
            self._enter_blocks(entering)
        views = self._views or upload([*self._rows, self._seq_lens], self._device)
        last = self._latest
        forward = ForwardBatch(
            token_ids_T=self._slots.history.read(views[_HISTORY]),
            positions_T=views[_POSITION],
            kv_layers=last.forward.kv_layers,
            attention=self._attention(views, last.forward.attention, has_new_blocks=bool(batch.new_blocks)),
            logits_rows_S=last.forward.logits_rows_S,
        )
        self._latest = StepInputs(forward, last.sampled_slots, next_positions, views[_WRITE], None, None)
        return self._latest

    def _enter_blocks(self, rows: IntArray) -> None:
        slots, positions = self._slot_ids[rows], self._rows[_POSITION, rows]
        history, tables = self._slots.history, self._slots.block_tables
        history.reserve(slots, positions + 1)
        self._rows[_HISTORY, rows] = history.flat_index(slots, positions)
        self._rows[_WRITE, rows] = history.flat_index(slots, positions + 1)
        block_size = self._cache.layout.block_size
        columns, offsets = np.divmod(positions, block_size)
        for group in range(tables.num_groups):
            self._rows[_MAPPING + group, rows] = tables.lookup(group, slots, columns) * block_size + offsets

    def _attention(
        self, views: list[Tensor], last: tuple[AttentionMetadata, ...], *, has_new_blocks: bool
    ) -> tuple[AttentionMetadata, ...]:
        """Metadata of every layer; `last` is that of the step before."""
        tables, num_columns = self._slots.block_tables, -(-self._max_seq_len // self._cache.layout.block_size)
        groups = self._cache.group_of_layer
        made: dict[int, AttentionMetadata] = {}
        for group in dict.fromkeys(groups):  # a pipeline stage may have layers of some groups alone
            before = last[groups.index(group)]
            table_RB = before.block_table_RB
            if has_new_blocks or num_columns > table_RB.shape[1]:
                table_RB = tables.gather(group, self._slot_ids, self._slots_R, num_columns)
            made[group] = AttentionMetadata(
                block_table_RB=table_RB,
                slot_mapping_T=views[_MAPPING + group],
                query_start_R1=before.query_start_R1,
                seq_lens_R=views[-1],
                num_decodes=before.num_decodes,
                max_query_len=1,
                max_seq_len=self._max_seq_len,
            )
        if len(made) == 1:
            return (made[groups[0]],) * len(groups)
        return tuple([made[group] for group in groups])
