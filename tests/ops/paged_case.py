"""A random step over a paged cache, and its attention computed token by token in float64: for tests of any backend."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from sonar.ops.table import AttentionMetadata, AttentionSpec

WILD_BLOCK = 2**30


@dataclass(frozen=True)
class PagedCase:
    """Queries and a filled cache. Slots that no request owns are NaN; table entries out of every window are wild."""

    q_THE: Tensor
    kv_cache: Tensor
    metadata: AttentionMetadata
    spec: AttentionSpec


def make_case(
    requests: list[tuple[int, int]], spec: AttentionSpec, block_size: int, dtype: torch.dtype = torch.float32
) -> PagedCase:
    """requests: (query tokens, sequence length after the step); those of one query token come first."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    needed = [-(-seq_len // block_size) for _, seq_len in requests]
    ids = draw.sample(range(sum(needed) + 5), sum(needed))
    shape = (sum(needed) + 5, 3, 2, spec.num_kv_heads, block_size, spec.head_dim)
    kv_cache = torch.full(shape, float("nan"), dtype=dtype)[:, 1]  # one layer of three: not contiguous
    table_RB = torch.full((len(requests), max(needed) + 1), WILD_BLOCK, dtype=torch.int32)
    for row, (num_queries, seq_len) in enumerate(requests):
        blocks = [ids.pop() for _ in range(needed[row])]
        for place, block in enumerate(blocks):
            filled = min(block_size, seq_len - place * block_size)
            values = torch.randn(2, spec.num_kv_heads, filled, spec.head_dim, generator=generator)
            kv_cache[block, :, :, :filled] = values.to(dtype)
        first = max(0, seq_len - num_queries - spec.window + 1) // block_size if spec.window else 0
        table_RB[row, first : len(blocks)] = torch.tensor(blocks[first:], dtype=torch.int32)
    lengths = [num_queries for num_queries, _ in requests]
    q_THE = torch.randn(sum(lengths), spec.num_heads, spec.head_dim, generator=generator).to(dtype)
    metadata = AttentionMetadata(
        block_table_RB=table_RB,
        slot_mapping_T=torch.empty(0, dtype=torch.int64),  # attention does not read it
        query_start_R1=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        seq_lens_R=torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32),
        num_decodes=sum(length == 1 for length in lengths),
        max_query_len=max(lengths),
        max_seq_len=max(seq_len for _, seq_len in requests),
    )
    return PagedCase(q_THE, kv_cache, metadata, spec)


def attend_one_by_one(case: PagedCase, sinks_H: Tensor | None = None) -> Tensor:
    """The op's formula for each token and head on its own, in float64: (T, H * E)."""
    spec, metadata = case.spec, case.metadata
    block_size, group = case.kv_cache.shape[3], spec.num_heads // spec.num_kv_heads
    out_THE = torch.zeros(case.q_THE.shape, dtype=torch.float64)
    starts, seq_lens = metadata.query_start_R1.tolist(), metadata.seq_lens_R.tolist()
    for request, seq_len in enumerate(seq_lens):
        for row in range(starts[request], starts[request + 1]):
            position = seq_len - starts[request + 1] + row
            first = max(0, position - spec.window + 1) if spec.window else 0
            blocks = metadata.block_table_RB[request].tolist()
            places = [(blocks[p // block_size], p % block_size) for p in range(first, position + 1)]
            for head in range(spec.num_heads):
                keys = torch.stack([case.kv_cache[b, 0, head // group, o].double() for b, o in places])
                values = torch.stack([case.kv_cache[b, 1, head // group, o].double() for b, o in places])
                scores = keys @ case.q_THE[row, head].double() * spec.scale
                if spec.softcap:
                    scores = spec.softcap * (scores / spec.softcap).tanh()
                weights = scores.exp()
                total = weights.sum() + (math.exp(sinks_H[head]) if sinks_H is not None else 0)
                out_THE[row, head] = weights @ values / total
    return out_THE.flatten(1)
