"""Attention and the small kernels of the CUDA backend alone, over tile sizes, beside what torch offers.

    python -m benchmarks.gpu.kernels decode prefill small

Prints the share of the card's own ceiling with every figure. Caches rotate among layers larger than the L2 together, so
that none is that of a warm cache. Products of few rows: `benchmarks.gpu.tune`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.ceilings import Ceilings, measure, time_in_graph_s, time_s
from sonar.ops.cuda import build
from sonar.ops.cuda_decode_attention import DecodeAttention
from sonar.ops.cuda_launch import supports_dependent_launch
from sonar.ops.cuda_prefill_attention import PrefillAttention
from sonar.ops.table import Activation, AttentionMetadata, AttentionSpec

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
SPEC = AttentionSpec(32, 8, 128, 128**-0.5)


def attempt(function: Callable[[], float]) -> float:
    """The figure, or infinity where the kernel does not fit the device."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - a sweep goes on over what cannot be compiled
        print(f"    failed: {str(error).splitlines()[0][:90]}")
        return float("inf")


def paged(num_requests: int, seq_len: int, num_queries: int, kv_heads: int = 8) -> tuple[Tensor, AttentionMetadata]:
    """A filled cache of two layers, and requests of equal length."""
    blocks = -(-seq_len // 16)
    cache = torch.randn(num_requests * blocks, 2, 2, kv_heads, 16, 128, device=DEVICE, dtype=BF16)
    table = torch.randperm(num_requests * blocks, device=DEVICE).to(torch.int32).view(num_requests, blocks)
    metadata = AttentionMetadata(
        block_table_RB=table,
        slot_mapping_T=torch.empty(0, dtype=torch.int64, device=DEVICE),
        query_start_R1=(torch.arange(num_requests + 1, device=DEVICE) * num_queries).to(torch.int32),
        seq_lens_R=torch.full((num_requests,), seq_len, dtype=torch.int32, device=DEVICE),
        num_decodes=num_requests if num_queries == 1 else 0,
        max_query_len=num_queries,
        max_seq_len=8192 if num_queries == 1 else seq_len,
    )
    return cache, metadata


def bench_decode(ceilings: Ceilings) -> None:
    """Split-KV decode, TB/s of K and V."""
    cases = ((1, 256), (1, 8192), (8, 256), (32, 256), (32, 1024), (256, 256), (256, 1024))
    for heads, (num_requests, seq_len) in itertools.product((32, 16), cases):
        spec = AttentionSpec(heads, 8, 128, 128**-0.5)
        cache, metadata = paged(num_requests, seq_len, 1)
        q = torch.randn(num_requests, heads, 128, device=DEVICE, dtype=BF16)
        size = num_requests * seq_len * 8 * 128 * 4
        for tile, stages, warps in itertools.product((32, 64, 128), (2, 3, 4), (2, 4)):
            attend = DecodeAttention(
                DEVICE, has_pdl=supports_dependent_launch(DEVICE), tile=tile, num_stages=stages, num_warps=warps
            )
            launch = partial(_attend_layer, attend, q, cache, metadata, spec)
            seconds = attempt(partial(time_in_graph_s, launch, 20, 3))
            print(
                f"decode {heads}/8 {num_requests:3} x {seq_len:5} tile {tile:3} stages {stages} warps {warps}"
                f" {size / seconds / 1e12:5.2f} TB/s ({1e6 * seconds:7.2f} us, {_share(size, seconds, ceilings)})"
            )


def _attend_layer(
    attend: DecodeAttention, q: Tensor, cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec, call: int
) -> None:
    attend(q, cache[:, call % 2], metadata, spec, None, torch.empty_like(q))


def bench_prefill(ceilings: Ceilings) -> None:
    """Causal prefill, TFLOP/s, beside torch's fused attention on contiguous K and V."""
    tiles = ((128, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2), (128, 32, 4, 4))
    for num_requests, length in ((1, 4096), (4, 4096), (32, 512)):
        cache, metadata = paged(num_requests, length, length)
        q = torch.randn(num_requests * length, 32, 128, device=DEVICE, dtype=BF16)
        flop = 4 * 32 * 128 * num_requests * length * length / 2
        rows: dict[str, Callable[[], object]] = {}
        for row_count, tile, warps, stages in tiles:
            attend = PrefillAttention(rows=row_count, tile=tile, num_warps=warps, num_stages=stages)
            name = f"rows {row_count} tile {tile} warps {warps} stages {stages}"
            rows[name] = partial(attend, q, cache[:, 0], metadata, SPEC, None, torch.empty_like(q))
        q_RHLE = q.view(num_requests, length, 32, 128).transpose(1, 2)
        kv = torch.randn(2, num_requests, 8, length, 128, device=DEVICE, dtype=BF16)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            rows[backend.name] = partial(_attend_torch, backend, q_RHLE, kv)
        for name, function in rows.items():
            seconds = attempt(partial(time_s, function, 10))
            share = flop / seconds / ceilings.bf16_flop_s
            print(f"prefill {num_requests:2} x {length} {name} {flop / seconds / 1e12:6.1f} TFLOP/s ({share:.0%})")


def _attend_torch(backend: SDPBackend, q: Tensor, kv: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, kv[0], kv[1], is_causal=True, enable_gqa=True)


def bench_small(ceilings: Ceilings) -> None:
    """Kernels that move rows once, for a step of 16,384 tokens, of 256 and of one."""
    ops = build(DEVICE, BF16)
    for tokens in (16384, 256, 1):
        x, residual = torch.randn(2, tokens, 4096, device=DEVICE, dtype=BF16)
        weight = torch.ones(4096, device=DEVICE, dtype=BF16)
        gate_up = torch.randn(tokens, 28672, device=DEVICE, dtype=BF16)
        qkv = torch.randn(tokens, 6144, device=DEVICE, dtype=BF16)
        cache = torch.zeros(tokens // 16 + 1, 2, 2, 8, 16, 128, device=DEVICE, dtype=BF16)[:, 0]
        positions, cos_sin = torch.arange(tokens, device=DEVICE), torch.randn(16384, 128, device=DEVICE)
        rope = partial(
            ops.rope_kv_write, qkv, positions, cos_sin, None, None, 0.0, cache, slot_mapping_T=positions, spec=SPEC
        )
        works: dict[str, tuple[Callable[[], object], int]] = {
            "add_rms_norm": (partial(ops.add_rms_norm, x, residual, weight, 1e-5), 8 * x.numel()),
            "gated": (partial(ops.gated_activation, gate_up, Activation.SILU), 3 * gate_up.numel()),
            "rope": (rope, 4 * qkv.numel()),
        }
        for name, (function, size) in works.items():
            seconds = time_in_graph_s(partial(_ignore, function), 10)
            print(f"{name:14} {tokens:6} tokens {1e6 * seconds:8.2f} us {_share(size, seconds, ceilings)}")


def _ignore(function: Callable[[], object], _call: int) -> None:
    function()


def _share(size: float, seconds: float, ceilings: Ceilings) -> str:
    return f"{size / seconds / ceilings.copy_bytes_s:.0%} of copy bandwidth"


def main(names: list[str]) -> None:
    """Runs the named parts."""
    ceilings = measure()
    print(ceilings, flush=True)
    parts = {"decode": bench_decode, "prefill": bench_prefill, "small": bench_small}
    for name in names or list(parts):
        parts[name](ceilings)


if __name__ == "__main__":
    main(sys.argv[1:])
