"""Each kernel of the CUDA backend alone, over tile sizes, beside what torch offers; with its share of the ceiling.

    python -m benchmarks.gpu.kernels one_row few_rows decode prefill small

Weights and caches rotate among copies larger than the L2, so that no figure is that of a warm cache.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu.ceilings import Ceilings, measure, time_in_graph_s, time_s
from sonar.ops.cuda_decode_attention import DecodeAttention
from sonar.ops.cuda_launch import supports_dependent_launch
from sonar.ops.cuda_linear import CudaLinear, FewRowsTiles, Fusion, OneRowTiles, Scratch
from sonar.ops.cuda_prefill_attention import PrefillAttention
from sonar.ops.table import Activation, AttentionMetadata, AttentionSpec

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
# name, out features, in features, how it is fused
SHAPES = (
    ("0.6b qkv", 4096, 1024, "norm"),
    ("0.6b o", 1024, 2048, "add"),
    ("0.6b gate_up", 6144, 1024, "gate"),
    ("0.6b down", 1024, 3072, "add"),
    ("0.6b head", 151936, 1024, ""),
    ("8b qkv", 6144, 4096, "norm"),
    ("8b o", 4096, 4096, "add"),
    ("8b gate_up", 28672, 4096, "gate"),
    ("8b down", 4096, 14336, "add"),
    ("8b head", 128256, 4096, ""),
)


def attempt(function: Callable[[], float]) -> float:
    """The figure, or infinity where the kernel does not fit the device."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - a sweep goes on over what cannot be compiled
        print(f"    failed: {str(error).splitlines()[0][:90]}")
        return float("inf")


def copies_of(num_out: int, num_in: int) -> list[torch.Tensor]:
    """Weights that together are 200 MB at least."""
    count = max(1, -(-200_000_000 // (2 * num_out * num_in)))
    return [torch.randn(num_out, num_in, device=DEVICE, dtype=BF16) * num_in**-0.5 for _ in range(count)]


def fusion_of(kind: str, num_rows: int, num_out: int, num_in: int) -> Fusion:
    """What a layer of that kind is fused with."""
    norm = torch.ones(num_in, device=DEVICE, dtype=BF16)
    if kind == "norm":
        return Fusion(norm_K=norm, norm_eps=1e-5)
    if kind == "gate":
        return Fusion(norm_K=norm, norm_eps=1e-5, gate=Activation.SILU)
    if kind == "add":
        return Fusion(residual_MN=torch.zeros(num_rows, num_out, device=DEVICE, dtype=BF16))
    return Fusion()


def one_row_tiles() -> Iterator[OneRowTiles]:
    for block_n, block_k, warps in itertools.product((2, 4, 8, 16, 32), (512, 1024, 2048, 4096), (4, 8)):
        if 4096 <= block_n * block_k <= 32768:
            yield OneRowTiles(block_n, block_k, warps)


def few_rows_tiles() -> Iterator[FewRowsTiles]:
    for block_n, block_k, split, stages in itertools.product((16, 32, 64), (128, 256, 512), (1, 2, 4), (3, 5)):
        if block_n * block_k * stages * 2 <= 120_000:
            yield FewRowsTiles(block_n, block_k, split, 4, stages)


def bench_products(ceilings: Ceilings, num_rows: int) -> None:
    """cuBLAS against every tile, in TB/s of weight."""
    scratch, has_pdl = Scratch(DEVICE), supports_dependent_launch(DEVICE)
    for name, num_out, num_in, kind in SHAPES:
        weights = copies_of(num_out, num_in)
        layers = [CudaLinear(weight, None, scratch, has_pdl=has_pdl) for weight in weights]
        x = torch.randn(num_rows, num_in, device=DEVICE, dtype=BF16)
        fusion = fusion_of(kind, num_rows, num_out, num_in)
        out = fusion.residual_MN
        if out is None:
            out = torch.empty(num_rows, num_out // (2 if kind == "gate" else 1), device=DEVICE, dtype=BF16)
        size = 2 * num_out * num_in
        calls = 100 if size < 50e6 else 20
        cublas = time_in_graph_s(lambda i: F.linear(x, weights[i % len(weights)]), calls)  # noqa: B023
        own = time_in_graph_s(lambda i: layers[i % len(layers)].apply_fused(x, fusion), calls)  # noqa: B023
        print(
            f"{name:14} rows {num_rows:3} cuBLAS {size / cublas / 1e12:5.2f} TB/s ({1e6 * cublas:6.2f} us)  own, default"
            f" {size / own / 1e12:5.2f} ({1e6 * own:6.2f} us, {size / own / ceilings.copy_bytes_s:.0%})",
            flush=True,
        )
        found = []
        for tiles in one_row_tiles() if num_rows == 1 else few_rows_tiles():
            if num_rows > 1 and tiles.split_k > 1 and num_out > 8192:
                continue

            def launch(i: int, tiles: OneRowTiles | FewRowsTiles = tiles) -> None:
                layer = layers[i % len(layers)]  # noqa: B023
                if isinstance(tiles, OneRowTiles):
                    layer.launch_one_row(x, out, fusion, tiles)  # noqa: B023
                else:
                    layer.launch_few_rows(x, out, fusion, tiles)  # noqa: B023

            found.append((attempt(lambda: time_in_graph_s(launch, calls, 3)), tiles))  # noqa: B023
        for seconds, tiles in sorted(found, key=lambda pair: pair[0])[:4]:
            print(f"    {size / seconds / 1e12:5.2f} TB/s ({1e6 * seconds:6.2f} us) {tiles}", flush=True)


def paged(
    num_requests: int, seq_len: int, num_queries: int, spec: AttentionSpec
) -> tuple[torch.Tensor, AttentionMetadata]:
    """A filled cache of one layer among two, and requests of equal length."""
    blocks = -(-seq_len // 16)
    shape = (num_requests * blocks, 2, 2, spec.num_kv_heads, 16, spec.head_dim)
    cache = torch.randn(shape, device=DEVICE, dtype=BF16)
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
    has_pdl = supports_dependent_launch(DEVICE)
    for heads, kv_heads in ((32, 8), (16, 8)):
        spec = AttentionSpec(heads, kv_heads, 128, 128**-0.5)
        for num_requests, seq_len in ((1, 256), (1, 8192), (8, 256), (32, 256), (32, 1024), (256, 256), (256, 1024)):
            cache, metadata = paged(num_requests, seq_len, 1, spec)
            q = torch.randn(num_requests, heads, 128, device=DEVICE, dtype=BF16)
            out = torch.empty_like(q)
            size = num_requests * seq_len * kv_heads * 128 * 4
            for tile, stages, warps in itertools.product((32, 64, 128), (2, 3, 4), (2, 4)):
                attend = DecodeAttention(DEVICE, has_pdl=has_pdl, tile=tile, num_stages=stages, num_warps=warps)

                def launch(i: int, attend: DecodeAttention = attend) -> None:
                    attend(q, cache[:, i % 2], metadata, spec, None, out)  # noqa: B023

                seconds = attempt(lambda: time_in_graph_s(launch, 20, 3))  # noqa: B023
                print(
                    f"decode {heads}/{kv_heads} {num_requests:3} x {seq_len:5} tile {tile:3} stages {stages} warps {warps}"
                    f" {size / seconds / 1e12:5.2f} TB/s ({1e6 * seconds:7.2f} us, {size / seconds / ceilings.copy_bytes_s:.0%})"
                )


def bench_prefill(ceilings: Ceilings) -> None:
    """Causal prefill, TFLOP/s, beside torch's fused attention on contiguous K and V."""
    spec = AttentionSpec(32, 8, 128, 128**-0.5)
    for num_requests, length in ((1, 4096), (4, 4096), (32, 512)):
        cache, metadata = paged(num_requests, length, length, spec)
        q = torch.randn(num_requests * length, 32, 128, device=DEVICE, dtype=BF16)
        out = torch.empty_like(q)
        flop = 4 * 32 * 128 * num_requests * length * length / 2
        for rows, tile, warps, stages in ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 4, 2), (128, 64, 4, 3),
                                          (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 3), (128, 32, 4, 4)):  # fmt: skip
            attend = PrefillAttention(rows=rows, tile=tile, num_warps=warps, num_stages=stages)
            seconds = attempt(lambda: time_s(lambda: attend(q, cache[:, 0], metadata, spec, None, out), 10))  # noqa: B023
            print(
                f"prefill {num_requests:2} x {length} rows {rows} tile {tile} warps {warps} stages {stages}"
                f" {flop / seconds / 1e12:6.1f} TFLOP/s ({flop / seconds / ceilings.bf16_flop_s:.0%})", flush=True,
            )  # fmt: skip
        k, v = torch.randn(2, num_requests, 8, length, 128, device=DEVICE, dtype=BF16)
        q_RHLE = q.view(num_requests, length, 32, 128).transpose(1, 2)
        for backend in (torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION):

            def attend_torch(backend: torch.nn.attention.SDPBackend = backend) -> float:
                with torch.nn.attention.sdpa_kernel(backend):
                    return time_s(
                        lambda: F.scaled_dot_product_attention(q_RHLE, k, v, is_causal=True, enable_gqa=True),
                        10,  # noqa: B023
                    )

            seconds = attempt(attend_torch)
            print(
                f"prefill {num_requests:2} x {length} {backend.name} {flop / seconds / 1e12:6.1f} TFLOP/s", flush=True
            )


def bench_small(ceilings: Ceilings) -> None:
    """Kernels that move rows once, for a step of 16,384 tokens and of one: microseconds and share of copy bandwidth."""
    from sonar.ops.cuda import build

    ops = build(DEVICE, BF16)
    spec = AttentionSpec(32, 8, 128, 128**-0.5)
    for tokens in (16384, 256, 1):
        x, residual, weight = (torch.randn(n, 4096, device=DEVICE, dtype=BF16) for n in (tokens, tokens, 1))
        gate_up = torch.randn(tokens, 28672, device=DEVICE, dtype=BF16)
        qkv = torch.randn(tokens, 6144, device=DEVICE, dtype=BF16)
        cache = torch.zeros(tokens // 16 + 1, 2, 2, 8, 16, 128, device=DEVICE, dtype=BF16)[:, 0]
        positions = torch.arange(tokens, device=DEVICE)
        cos_sin = torch.randn(16384, 128, device=DEVICE)
        logits = torch.randn(min(tokens, 256), 128256, device=DEVICE)
        works = {
            "add_rms_norm": (lambda: ops.add_rms_norm(x, residual, weight[0], 1e-5), 8 * x.numel()),  # noqa: B023
            "gated": (lambda: ops.gated_activation(gate_up, Activation.SILU), 3 * gate_up.numel()),  # noqa: B023
            "rope": (lambda: ops.rope_kv_write(qkv, positions, cos_sin, None, None, 0.0, cache, positions, spec), 4 * qkv.numel()),  # noqa: B023, E501
            "argmax torch": (lambda: logits.argmax(dim=-1), 4 * logits.numel()),  # noqa: B023
        }  # fmt: skip
        for name, (function, size) in works.items():
            seconds = time_in_graph_s(lambda _: function(), 10)  # noqa: B023
            print(f"{name:14} {tokens:6} tokens {1e6 * seconds:8.2f} us {size / seconds / ceilings.copy_bytes_s:.0%}")


def main(names: list[str]) -> None:
    """Runs the named parts."""
    ceilings = measure()
    print(ceilings, flush=True)
    parts = {
        "one_row": lambda: bench_products(ceilings, 1),
        "few_rows": lambda: bench_products(ceilings, 8),
        "decode": lambda: bench_decode(ceilings),
        "prefill": lambda: bench_prefill(ceilings),
        "small": lambda: bench_small(ceilings),
    }
    for name in names or list(parts):
        parts[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
