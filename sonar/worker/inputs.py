"""From a step's message to what the model reads: `StepBatch` -> `StepInputs`, in vectorized numpy and one upload.

Knows nothing of sampling beyond which rows are drawn from, and nothing of kernels. Called by the model runner once a
step, after `SlotTable.apply`. The tokens are read from the slots' history on the device, so that a token whose draw is
still under way is read like any other.

Legend: T tokens of the step, R requests, S rows sampled from, Q prompt positions whose log-probabilities are wanted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonar.messages import StepBatch
from sonar.models.base import ForwardBatch
from sonar.ops.table import AttentionMetadata
from sonar.worker.kv_cache import KVCache
from sonar.worker.slots import Option, SlotTable
from sonar.worker.upload import upload

IntArray = NDArray[np.int64]


class PromptRows(NamedTuple):
    """Prompt positions of this step's chunks that are to be scored; position p is scored on the token at p + 1.

    Attributes:
        slots: of each chunk, with `counts` positions each.
        rows_Q: token rows. targets_Q: places in the history of the tokens to score.
    """

    slots: list[int]
    counts: list[int]
    rows_Q: Tensor
    targets_Q: Tensor


class StepInputs(NamedTuple):
    """One step, ready to compute.

    Attributes:
        sampled_slots, sampled_positions: of the S rows drawn from, and the position each drawn token will take.
        sampled_rows_S: their token rows; None when they are all rows of the step, in order.
        prompt: None when no request asks.
    """

    forward: ForwardBatch
    sampled_slots: IntArray
    sampled_positions: IntArray
    sampled_rows_S: Tensor | None
    prompt: PromptRows | None


class _Plan(NamedTuple):
    """The step as flat host arrays, one entry a token (`token_*`) or a request."""

    slots: IntArray
    seq_lens: IntArray
    query_start: IntArray
    token_slots: IntArray
    token_positions: IntArray
    num_decodes: int
    max_query_len: int


class _Where(NamedTuple):
    """The step on the device, as far as attention reads it; mappings: slot_mapping_T of each group, then anything."""

    slots_R: Tensor
    query_start_R1: Tensor
    seq_lens_R: Tensor
    mappings: list[Tensor]


class _PromptPlan(NamedTuple):
    slots: list[int]
    counts: list[int]
    rows: IntArray
    targets: IntArray


def build_inputs(batch: StepBatch, slots: SlotTable, cache: KVCache, device: torch.device) -> StepInputs:
    """Prepares one step whose slot changes have been applied.

    Args:
        batch: at least one request; requests of length 1 come first.
        cache: gives layers their views and each layer its group.
    """
    plan = _flatten(batch)
    samples = np.array(batch.samples, dtype=np.bool_)
    sampled_rows = plan.query_start[1:][samples] - 1
    prompt = _plan_prompt_rows(plan, slots)
    wanted = sampled_rows if prompt is None else np.concatenate([sampled_rows, prompt.rows])
    block_size = cache.layout.block_size
    columns, offsets = np.divmod(plan.token_positions, block_size)
    mappings = [
        slots.block_tables.lookup(group, plan.token_slots, columns) * block_size + offsets
        for group in range(slots.block_tables.num_groups)
    ]
    arrays: list[NDArray[Any]] = [
        plan.token_positions,
        slots.history.flat_index(plan.token_slots, plan.token_positions),
        plan.query_start.astype(np.int32),
        plan.seq_lens.astype(np.int32),
        plan.slots,
        wanted,
        *mappings,
        *([prompt.targets] if prompt else []),
    ]
    positions_T, history_T, query_start_R1, seq_lens_R, slots_R, wanted_SQ, *rest = upload(arrays, device)
    where = _Where(slots_R, query_start_R1, seq_lens_R, rest)
    metadata = _attention_metadata(plan, where, slots, block_size)
    forward = ForwardBatch(
        token_ids_T=slots.history.read(history_T),
        positions_T=positions_T,
        kv_layers=cache.layers,
        attention=tuple(metadata[group] for group in cache.group_of_layer),
        logits_rows_S=wanted_SQ,
    )
    num_sampled = len(sampled_rows)
    is_every_row = num_sampled == len(plan.token_positions)
    return StepInputs(
        forward=forward,
        sampled_slots=plan.slots[samples],
        sampled_positions=plan.seq_lens[samples],
        sampled_rows_S=None if is_every_row else wanted_SQ[:num_sampled],
        prompt=PromptRows(prompt.slots, prompt.counts, wanted_SQ[num_sampled:], rest[-1]) if prompt else None,
    )


def _attention_metadata(plan: _Plan, where: _Where, slots: SlotTable, block_size: int) -> list[AttentionMetadata]:
    """Metadata of each cache group."""
    max_seq_len = int(plan.seq_lens.max())
    num_columns = -(-max_seq_len // block_size)
    return [
        AttentionMetadata(
            block_table_RB=slots.block_tables.gather(group, plan.slots, where.slots_R, num_columns),
            slot_mapping_T=where.mappings[group],
            query_start_R1=where.query_start_R1,
            seq_lens_R=where.seq_lens_R,
            num_decodes=plan.num_decodes,
            max_query_len=plan.max_query_len,
            max_seq_len=max_seq_len,
        )
        for group in range(slots.block_tables.num_groups)
    ]


def _flatten(batch: StepBatch) -> _Plan:
    slots = np.array(batch.slots, dtype=np.int64)
    starts = np.array(batch.starts, dtype=np.int64)
    lengths = np.array(batch.lengths, dtype=np.int64)
    query_start = np.zeros(len(slots) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    max_query_len = int(lengths.max())
    if max_query_len == 1:
        return _Plan(slots, starts + 1, query_start, slots, starts, len(slots), 1)
    num_decodes = int(np.argmax(lengths > 1))
    assert (lengths[num_decodes:] > 1).all(), f"requests of length 1 come first: {batch.lengths}"
    token_positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, lengths)
    token_slots = np.repeat(slots, lengths)
    return _Plan(slots, starts + lengths, query_start, token_slots, token_positions, num_decodes, max_query_len)


def _plan_prompt_rows(plan: _Plan, slots: SlotTable) -> _PromptPlan | None:
    """Rows of this step that lie in a prompt to be scored and have a next prompt token; None if there are none."""
    asks = (slots.options[plan.slots] & Option.PROMPT_LOGPROBS) != 0
    if not asks.any():
        return None
    chunk_slots, counts, rows, targets = [], [], [], []
    for i in np.flatnonzero(asks).tolist():
        slot, first_row = int(plan.slots[i]), int(plan.query_start[i])
        start = int(plan.token_positions[first_row])
        end = min(int(plan.seq_lens[i]), int(slots.prompt_len[slot]) - 1)
        if end <= start:
            continue
        positions = np.arange(start, end, dtype=np.int64)
        chunk_slots.append(slot)
        counts.append(len(positions))
        rows.append(positions - start + first_row)
        targets.append(slots.history.flat_index(np.full(len(positions), slot, dtype=np.int64), positions + 1))
    if not rows:
        return None
    return _PromptPlan(chunk_slots, counts, np.concatenate(rows), np.concatenate(targets))
