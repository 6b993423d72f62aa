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
        self._num_groups = len(cache.layout.groups)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids = zeros(max_requests)
        self._positions = zeros(max_requests)
        self._seq_lens = zeros(max_requests, dtype=torch.int32)
        self._slots = zeros(self._num_groups, max_requests).fill_(-1)
        self._tables = zeros(self._num_groups, max_requests, max_blocks, dtype=torch.int32)
        self._query_start = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        unused = zeros(1)
        self._greedy = SamplingTensors(*(unused,) * 6, all_greedy=True, any_filter=False)
        self._latest_tables: list[Tensor | None] = [None] * self._num_groups
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
        ones_S, zeros_S2 = torch.ones(2, device=logits_SV.device), self._positions.new_zeros(2, 2)
        unused = self._positions[:2]
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
        self._token_ids[:num_rows].copy_(forward.token_ids_T)
        self._positions[:num_rows].copy_(forward.positions_T)
        groups = self._cache.group_of_layer
        for group in range(self._num_groups):
            metadata = forward.attention[groups.index(group)]
            self._slots[group, :num_rows].copy_(metadata.slot_mapping_T)
            table_RB = metadata.block_table_RB
            # A run of decode steps keeps the object while no table grows.
            if table_RB is not self._latest_tables[group]:
                self._tables[group, :num_rows, : table_RB.shape[1]].copy_(table_RB)
                self._latest_tables[group] = table_RB
        self._seq_lens[:num_rows].copy_(forward.attention[0].seq_lens_R)
        if self._num_filled > num_rows:
            self._slots[:, num_rows : self._num_filled].fill_(-1)
            self._seq_lens[num_rows : self._num_filled].zero_()
        self._num_filled = num_rows

    def _mixed_batch(self, num_queries: int) -> ForwardBatch:
        """A decode and a chunk of a prompt, of no slot: nothing is written, and block 0 is read."""
        num_tokens, device = 1 + num_queries, self._positions.device
        metadata = AttentionMetadata(
            block_table_RB=torch.zeros(2, self._tables.shape[2], dtype=torch.int32, device=device),
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
        metadata = [
            AttentionMetadata(
                block_table_RB=self._tables[group, :size],
                slot_mapping_T=self._slots[group, :size],
                query_start_R1=self._query_start[: size + 1],
                seq_lens_R=self._seq_lens[:size],
                num_decodes=size,
                max_query_len=1,
                max_seq_len=self._max_seq_len,
            )
            for group in range(self._num_groups)
        ]
        return ForwardBatch(
            token_ids_T=self._token_ids[:size],
            positions_T=self._positions[:size],
            kv_layers=self._cache.layers,
            attention=tuple([metadata[group] for group in self._cache.group_of_layer]),
            logits_rows_S=self._query_start[:size],
        )
