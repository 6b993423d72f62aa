"""Decode steps as captured CUDA graphs: one launch a step in place of hundreds.

A graph is captured for each of a ladder of batch sizes, over buffers that stay where they are; a step copies its inputs
there, padded to the next size, and replays. Padding rows have no tokens: their slot is negative and their length 0,
which ops of a capturable table (`OpTable.is_capturable`) neither write nor read. Knows nothing of requests or sampling.
Called by the model runner, in its thread.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sonar.models.base import ForwardBatch, Model
from sonar.ops.table import AttentionMetadata, SampleFn, SamplingTensors
from sonar.worker.inputs import StepInputs
from sonar.worker.kv_cache import KVCache

_logger = logging.getLogger(__name__)

# (from, step): finer where a row costs more than padding saves launches.
_LADDER = ((1, 1), (2, 2), (8, 4), (16, 8), (64, 16), (128, 32), (256, 64), (1024, 256))


# Beyond this, finding the likeliest tokens for nothing (rows that draw) costs more than the launches it saves.
_MAX_GREEDY = 64
# Attention has a kernel each for chunks of up to 16 tokens, short sequences and long ones.
_WARM_UP_QUERIES = (2, 32, 1100)


class DecodeResult(NamedTuple):
    """What a decode step computed. greedy_S: likeliest token of each row; None where it was not looked for."""

    hidden_TD: Tensor
    logits_SV: Tensor
    greedy_S: Tensor | None


@dataclass(frozen=True)
class _Buffers:
    """The inputs that graphs read, of the largest batch; a step has one token a request. C: groups of the cache.

    slots_CR: -1 where there is no request. query_start_R1: 0, 1, 2, ..., which never changes.
    """

    token_ids_R: Tensor
    positions_R: Tensor
    seq_lens_R: Tensor
    slots_CR: Tensor
    tables_CRB: Tensor
    query_start_R1: Tensor


def _allocate(num_groups: int, max_requests: int, max_blocks: int, device: torch.device) -> _Buffers:
    """Buffers of padding rows alone."""
    int32, int64 = torch.int32, torch.int64
    return _Buffers(
        token_ids_R=torch.zeros(max_requests, dtype=int64, device=device),
        positions_R=torch.zeros(max_requests, dtype=int64, device=device),
        seq_lens_R=torch.zeros(max_requests, dtype=int32, device=device),
        slots_CR=torch.full((num_groups, max_requests), -1, dtype=int64, device=device),
        tables_CRB=torch.zeros((num_groups, max_requests, max_blocks), dtype=int32, device=device),
        query_start_R1=torch.arange(max_requests + 1, dtype=int32, device=device),
    )


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: DecodeResult


def _capture_stream() -> torch.cuda.Stream:
    """torch's own stream for captures: cuBLAS keeps 32 MiB for every stream it ever worked on, so one must do."""
    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return torch.cuda.graph.default_capture_stream


def ladder(max_requests: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending; the last is max_requests."""
    sizes = []
    size, steps = 1, dict(_LADDER)
    step = 1
    while size < max_requests:
        sizes.append(size)
        step = steps.get(size, step)
        size += step
    return (*sizes, max_requests)


class DecodeGraphs:
    """Owns the graphs, their buffers and their memory pool.

    The results of a step are good until the next is replayed.

    Args:
        sample: finds the likeliest tokens. max_requests: largest batch. max_blocks: columns of the longest block table.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        sample: SampleFn,
        device: torch.device,
        *,
        max_requests: int,
        max_blocks: int,
    ) -> None:
        self._model = model
        self._sample = sample
        self._cache = cache
        self._max_seq_len = max_blocks * cache.layout.block_size
        self._sizes = ladder(max_requests)
        self._graphs: dict[int, _Captured] = {}
        num_groups = len(cache.layout.groups)
        self._buffers = _allocate(num_groups, max_requests, max_blocks, device)
        unused = torch.zeros(1, dtype=torch.int64, device=device)
        self._greedy = SamplingTensors(*(unused,) * 6, all_greedy=True, any_filter=False)
        self._latest_tables: list[Tensor | None] = [None] * num_groups
        self._num_filled = 0

    def capture(self) -> None:
        """Captures every size, the largest first, so that the smaller ones fit into its memory."""
        began = time.monotonic()
        stream = _capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            for size in reversed(self._sizes):
                batch = self._batch(size)
                self._compute(batch)  # compiles what is not compiled: not allowed in capture
                graph = torch.cuda.CUDAGraph()
                # Other threads may allocate meanwhile; only this thread's mistakes should end the capture.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                result = self._compute(batch)
                graph.capture_end()
                self._graphs[size] = _Captured(graph, result)
        torch.cuda.current_stream().wait_stream(stream)
        _logger.info("captured %d decode graphs in %.1f s", len(self._sizes), time.monotonic() - began)

    def warm_up(self) -> None:
        """Runs what steps outside the graphs run, so that nothing is left to compile while requests wait.

        A chunk of a prompt beside a decode, in each of the lengths by which attention chooses its kernel, and a draw.
        """
        for num_queries in _WARM_UP_QUERIES:
            if num_queries < self._max_seq_len:
                hidden_TD = self._model.forward(self._mixed_batch(num_queries))
        logits_SV = self._model.logits(hidden_TD[:2])
        positions_R = self._buffers.positions_R
        ones_S, zeros_S2 = torch.ones(2, device=logits_SV.device), positions_R.new_zeros(2, 2)
        unused = positions_R[:2]
        settings = SamplingTensors(ones_S, *(unused,) * 4, key_S2=zeros_S2, all_greedy=False, any_filter=False)
        self._sample(logits_SV, settings)

    def can_run(self, inputs: StepInputs) -> bool:
        """Whether a step is one of captured shape: one token a request, every row drawn from."""
        forward = inputs.forward
        is_decode = inputs.sampled_rows_S is None and inputs.prompt is None and forward.attention[0].max_query_len == 1
        return is_decode and forward.token_ids_T.shape[0] <= self._sizes[-1] and bool(self._graphs)

    def run(self, inputs: StepInputs) -> DecodeResult:
        """The results of a step that `can_run`."""
        forward = inputs.forward
        num_rows = forward.token_ids_T.shape[0]
        captured = self._graphs[self._sizes[bisect_left(self._sizes, num_rows)]]
        self._fill(forward, num_rows)
        captured.graph.replay()
        hidden_TD, logits_SV, greedy_S = captured.result
        greedy_S = None if greedy_S is None else greedy_S[:num_rows]
        return DecodeResult(hidden_TD[:num_rows], logits_SV[:num_rows], greedy_S)

    def _compute(self, batch: ForwardBatch) -> DecodeResult:
        hidden_TD = self._model.forward(batch)
        logits_SV = self._model.logits(hidden_TD)
        is_small = logits_SV.shape[0] <= _MAX_GREEDY
        return DecodeResult(hidden_TD, logits_SV, self._sample(logits_SV, self._greedy) if is_small else None)

    def _fill(self, forward: ForwardBatch, num_rows: int) -> None:
        buffers = self._buffers
        buffers.token_ids_R[:num_rows].copy_(forward.token_ids_T)
        buffers.positions_R[:num_rows].copy_(forward.positions_T)
        for group, latest_RB in enumerate(self._latest_tables):
            metadata = forward.attention[self._cache.group_of_layer.index(group)]
            buffers.slots_CR[group, :num_rows].copy_(metadata.slot_mapping_T)
            table_RB = metadata.block_table_RB
            # A run of decode steps keeps the object while no table grows.
            if table_RB is not latest_RB:
                buffers.tables_CRB[group, :num_rows, : table_RB.shape[1]].copy_(table_RB)
                self._latest_tables[group] = table_RB
        buffers.seq_lens_R[:num_rows].copy_(forward.attention[0].seq_lens_R)
        if self._num_filled > num_rows:
            buffers.slots_CR[:, num_rows : self._num_filled].fill_(-1)
            buffers.seq_lens_R[num_rows : self._num_filled].zero_()
        self._num_filled = num_rows

    def _mixed_batch(self, num_queries: int) -> ForwardBatch:
        """A decode and a chunk of a prompt, of no slot: nothing is written, and block 0 is read."""
        num_tokens, device = 1 + num_queries, self._buffers.positions_R.device
        metadata = AttentionMetadata(
            block_table_RB=torch.zeros(2, self._buffers.tables_CRB.shape[2], dtype=torch.int32, device=device),
            slot_mapping_T=torch.full((num_tokens,), -1, device=device),
            query_start_R1=torch.tensor([0, 1, num_tokens], dtype=torch.int32, device=device),
            seq_lens_R=torch.tensor([1, num_queries], dtype=torch.int32, device=device),
            num_decodes=1,
            max_query_len=num_queries,
            max_seq_len=num_queries,
        )
        zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        return ForwardBatch(
            token_ids_T=zeros_T,
            positions_T=zeros_T,
            kv_layers=self._cache.layers,
            attention=(metadata,) * len(self._cache.layers),
            logits_rows_S=zeros_T[:1],
        )

    def _batch(self, size: int) -> ForwardBatch:
        """The buffers' first rows as a batch."""
        buffers = self._buffers
        metadata = [
            AttentionMetadata(
                block_table_RB=table_RB[:size],
                slot_mapping_T=slots_R[:size],
                query_start_R1=buffers.query_start_R1[: size + 1],
                seq_lens_R=buffers.seq_lens_R[:size],
                num_decodes=size,
                max_query_len=1,
                max_seq_len=self._max_seq_len,
            )
            for table_RB, slots_R in zip(buffers.tables_CRB, buffers.slots_CR, strict=True)
        ]
        return ForwardBatch(
            token_ids_T=buffers.token_ids_R[:size],
            positions_T=buffers.positions_R[:size],
            kv_layers=self._cache.layers,
            attention=tuple([metadata[group] for group in self._cache.group_of_layer]),
            logits_rows_S=buffers.query_start_R1[:size],
        )
