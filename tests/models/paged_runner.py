"""Runs a model step by step over a paged cache that punishes every wrong read, for comparison with whole forwards.

Cache slots start as NaN; block ids are scattered; in a sliding group a request's table holds a wild id wherever its
window no longer reaches, so that reading one fails loudly.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from sonar.config import LayerKind, ModelConfig
from sonar.models.base import ForwardBatch, Model
from sonar.ops.table import AttentionMetadata

_WILD_BLOCK = 2**30
BLOCK_SIZE = 8
NUM_BLOCKS = 96


class PagedRunner:
    """Holds the cache of one model and, per request, how far it is computed."""

    def __init__(self, model: Model, config: ModelConfig, dtype: torch.dtype, device: str = "cpu") -> None:
        self._model = model
        self._config = config
        self._device = device
        self._kinds = tuple(dict.fromkeys(config.layer_kinds))
        self._done: dict[int, int] = {}
        self._tables: dict[tuple[LayerKind, int], list[int]] = {}
        self._free = {kind: random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS) for kind in self._kinds}
        views: dict[int, Tensor] = {}
        for kind in self._kinds:
            layers = [i for i, of in enumerate(config.layer_kinds) if of is kind]
            planes, heads, dim = config.cache_shape
            shape = (NUM_BLOCKS, len(layers), planes, heads, BLOCK_SIZE, dim)
            cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
            views |= {layer: cache[:, place] for place, layer in enumerate(layers)}
        self._kv_layers = tuple(views[layer] for layer in range(config.num_layers))

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[int, list[int]]]) -> list[Tensor]:
        """Computes one step of (request, its next tokens); single tokens come first. Returns logits_TV a request."""
        return list(self._model.logits(self.hidden(chunks)).split([len(tokens) for _, tokens in chunks]))

    @torch.inference_mode()
    def hidden(self, chunks: Sequence[tuple[int, list[int]]], hidden_TD: Tensor | None = None) -> Tensor:
        """The step's hidden states; hidden_TD are those of the pipeline stage before this one."""
        lengths = [len(tokens) for _, tokens in chunks]
        starts = [self._done.get(request, 0) for request, _ in chunks]
        metadata = {kind: self._metadata(kind, [r for r, _ in chunks], starts, lengths) for kind in self._kinds}
        positions = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        batch = ForwardBatch(
            token_ids_T=torch.tensor([token for _, tokens in chunks for token in tokens], device=self._device),
            positions_T=torch.cat(positions).to(self._device),
            kv_layers=self._kv_layers,
            attention=tuple(metadata[kind] for kind in self._config.layer_kinds),
            logits_rows_S=torch.arange(sum(lengths), device=self._device),
            hidden_TD=hidden_TD,
        )
        hidden_TD = self._model.forward(batch)
        for (request, _), start, length in zip(chunks, starts, lengths, strict=True):
            self._done[request] = start + length
        return hidden_TD

    def _metadata(
        self, kind: LayerKind, requests: list[int], starts: list[int], lengths: list[int]
    ) -> AttentionMetadata:
        seq_lens = [start + length for start, length in zip(starts, lengths, strict=True)]
        width = -(-max(seq_lens) // BLOCK_SIZE)
        table_RB = torch.full((len(requests), width), _WILD_BLOCK, dtype=torch.int32)
        slots: list[int] = []
        for row, request in enumerate(requests):
            blocks = self._tables.setdefault((kind, request), [])
            while len(blocks) * BLOCK_SIZE < seq_lens[row]:
                blocks.append(self._free[kind].pop())
            window = self._config.sliding_window if kind is LayerKind.SLIDING else seq_lens[row]
            first = max(0, starts[row] - window + 1) // BLOCK_SIZE
            table_RB[row, first : len(blocks)] = torch.tensor(blocks[first:], dtype=torch.int32)
            slots += [
                blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for position in range(starts[row], seq_lens[row])
            ]
        return AttentionMetadata(
            block_table_RB=table_RB.to(self._device),
            slot_mapping_T=torch.tensor(slots, device=self._device),
            query_start_R1=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self._device),
            seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32, device=self._device),
            num_decodes=next((i for i, length in enumerate(lengths) if length > 1), len(lengths)),
            max_query_len=max(lengths),
            max_seq_len=max(seq_lens),
        )
