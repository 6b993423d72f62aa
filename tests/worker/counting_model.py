"""A model whose logits are exact integers' functions of its whole context, read back through the paged cache.

It writes each token into the cache where `slot_mapping` says and recomputes a checksum from what the block tables say,
so a wrong mapping, table, length or order changes its output; and nothing else does, not even rounding.
"""

from __future__ import annotations

import torch

from sonar.config import LayerKind
from sonar.kvcache.groups import CacheGroup
from sonar.models.base import ForwardBatch
from sonar.ops.table import SamplingTensors

VOCAB = 61
_PRIME = 997


class CountingModel:
    """Two layers a group; windows: tokens seen per group, 0 = all."""

    def __init__(self, windows=(0,), block_size=4):
        self.groups = tuple(
            CacheGroup(LayerKind.SLIDING if w else LayerKind.FULL, (2 * g, 2 * g + 1), w) for g, w in enumerate(windows)
        )
        self.block_size = block_size
        self.table = torch.randn(_PRIME, VOCAB, generator=torch.Generator().manual_seed(7))
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        checksum = torch.zeros(len(batch.token_ids_T), dtype=torch.int64)
        for layer, (kv, meta) in enumerate(zip(batch.kv_layers, batch.attention)):
            self._write(kv, meta, batch.token_ids_T * 2 + layer)
            checksum = (checksum * 31 + self._read(kv, meta, batch, layer)) % _PRIME
        return checksum[:, None].to(torch.float32)

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        return self.table[hidden_SD[:, 0].to(torch.int64)].clone()

    def _write(self, kv, meta, values):
        block, offset = meta.slot_mapping_T // self.block_size, meta.slot_mapping_T % self.block_size
        kv[block, 0, 0, offset, 0] = values.to(kv.dtype)

    def _read(self, kv, meta, batch, layer):
        window = self.groups[layer // 2].window
        sums = []
        for r in range(len(meta.seq_lens_R)):
            for row in range(int(meta.query_start_R1[r]), int(meta.query_start_R1[r + 1])):
                end = int(batch.positions_T[row]) + 1
                positions = torch.arange(max(0, end - window) if window else 0, end)
                blocks = meta.block_table_RB[r, positions // self.block_size].long()
                values = kv[blocks, 0, 0, positions % self.block_size, 0].to(torch.int64)
                sums.append((values * (positions + 1)).sum() % _PRIME)
        return torch.stack(sums)


def argmax_sample(logits_SV: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    """Greedy rows take the argmax; others add a noise that is a function of their key alone."""
    if sampling.all_greedy:
        return logits_SV.argmax(dim=1)
    ids = torch.arange(logits_SV.shape[1])
    noise = ((ids * 2654435761 + sampling.key_S2[:, :1]) ^ sampling.key_S2[:, 1:]) % 1013 / 250.0
    return (logits_SV + torch.where(sampling.temperature_S[:, None] > 0, noise, 0.0)).argmax(dim=1)
