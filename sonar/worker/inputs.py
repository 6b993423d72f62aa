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
        sampled_slots, sampled_positions: of the S rows drawn from, and the position each drawn token will take. The
            same array object as in the step before when the slots are the same in a row of decode steps.
        write_S: places in the history for the drawn tokens.
        sampled_rows_S: token rows drawn from; None when they are all rows of the step, in order.
        prompt: None when no request asks.
    """

    forward: ForwardBatch
    sampled_slots: IntArray
    sampled_positions: IntArray
    write_S: Tensor
    sampled_rows_S: Tensor | None
    prompt: PromptRows | None


class StepPlan(NamedTuple):
    """A step as flat host arrays, one entry a token (`token_*`), a request, or a sampled row.

    Attributes:
        history, mappings: places of the tokens in the history and, per cache group, in the cache.
        samples: which requests are sampled. write: places in the history of the tokens they will draw.
    """

    slots: IntArray
    seq_lens: IntArray
    query_start: IntArray
    token_slots: IntArray
    token_positions: IntArray
    history: IntArray
    mappings: list[IntArray]
    samples: NDArray[np.bool_]
    write: IntArray
    num_decodes: int
    max_query_len: int

    @property
    def is_decode_only(self) -> bool:
        """Whether each request computes one token and draws the next."""
        return self.max_query_len == 1 and bool(self.samples.all())


class _PromptPlan(NamedTuple):
    slots: list[int]
    counts: list[int]
    rows: IntArray
    targets: IntArray


def plan_step(batch: StepBatch, slots: SlotTable, block_size: int) -> StepPlan:
    """Computes where every token of a step lies; reserves places for those it draws.

    Args:
        batch: at least one request; requests of length 1 come first. Its slot changes are applied.
    """
    slot_ids = np.array(batch.slots, dtype=np.int64)
    starts = np.array(batch.starts, dtype=np.int64)
    lengths = np.array(batch.lengths, dtype=np.int64)
    samples = np.array(batch.samples, dtype=np.bool_)
    seq_lens = starts + lengths
    query_start = np.zeros(len(slot_ids) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    max_query_len = int(lengths.max())
    if max_query_len == 1:
        num_decodes, token_slots, token_positions = len(slot_ids), slot_ids, starts
    else:
        num_decodes = int(np.argmax(lengths > 1))
        assert (lengths[num_decodes:] > 1).all(), f"requests of length 1 come first: {batch.lengths}"
        token_slots = np.repeat(slot_ids, lengths)
        token_positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, lengths)
    slots.history.reserve(slot_ids[samples], seq_lens[samples])
    columns, offsets = np.divmod(token_positions, block_size)
    tables = slots.block_tables
    return StepPlan(
        slots=slot_ids,
        seq_lens=seq_lens,
        query_start=query_start,
        token_slots=token_slots,
        token_positions=token_positions,
        history=slots.history.flat_index(token_slots, token_positions),
        mappings=[
            tables.lookup(group, token_slots, columns) * block_size + offsets for group in range(tables.num_groups)
        ],
        samples=samples,
        write=slots.history.flat_index(slot_ids[samples], seq_lens[samples]),
        num_decodes=num_decodes,
        max_query_len=max_query_len,
    )


def build_inputs(plan: StepPlan, slots: SlotTable, cache: KVCache, device: torch.device) -> StepInputs:
    """Puts a planned step on the device.

    Args:
        cache: gives layers their views and each layer its group.
    """
    sampled_rows = plan.query_start[1:][plan.samples] - 1
    prompt = _plan_prompt_rows(plan, slots)
    wanted = sampled_rows if prompt is None else np.concatenate([sampled_rows, prompt.rows])
    arrays: list[NDArray[Any]] = [
        plan.token_positions,
        plan.history,
        plan.query_start.astype(np.int32),
        plan.seq_lens.astype(np.int32),
        plan.slots,
        plan.write,
        wanted,
        *plan.mappings,
        *([prompt.targets] if prompt else []),
    ]
    positions_T, history_T, query_start_R1, seq_lens_R, slots_R, write_S, wanted_SQ, *rest = upload(arrays, device)
    max_seq_len = int(plan.seq_lens.max())
    num_columns = -(-max_seq_len // cache.layout.block_size)
    metadata = [
        AttentionMetadata(
            block_table_RB=slots.block_tables.gather(group, plan.slots, slots_R, num_columns),
            slot_mapping_T=rest[group],
            query_start_R1=query_start_R1,
            seq_lens_R=seq_lens_R,
            num_decodes=plan.num_decodes,
            max_query_len=plan.max_query_len,
            max_seq_len=max_seq_len,
        )
        for group in range(len(plan.mappings))
    ]
    forward = ForwardBatch(
        token_ids_T=slots.history.read(history_T),
        positions_T=positions_T,
        kv_layers=cache.layers,
        attention=tuple([metadata[group] for group in cache.group_of_layer]),
        logits_rows_S=wanted_SQ,
    )
    num_sampled = len(sampled_rows)
    is_every_row = num_sampled == len(plan.token_positions)
    return StepInputs(
        forward=forward,
        sampled_slots=plan.slots[plan.samples],
        sampled_positions=plan.seq_lens[plan.samples],
        write_S=write_S,
        sampled_rows_S=None if is_every_row else wanted_SQ[:num_sampled],
        prompt=PromptRows(prompt.slots, prompt.counts, wanted_SQ[num_sampled:], rest[-1]) if prompt else None,
    )


def _plan_prompt_rows(plan: StepPlan, slots: SlotTable) -> _PromptPlan | None:
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
