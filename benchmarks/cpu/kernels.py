"""Each CPU kernel against the machine's ceilings, which are measured in the same run.

    python benchmarks/cpu/kernels.py [--threads 2] [--level avx2] [--rounds 7] [--only linear]

Prints medians: GB/s with the share of the read bandwidth where memory bounds a kernel, GFLOP/s or GOP/s (a multiply and
an add are two) with the share of the f32 or integer arithmetic where that does. Shapes are those of SmolLM2-135M and of
a 1.5B model. Needs nothing but the installed package; other load on the machine shows in both sides of a ratio.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from sonar.ops import _cpu, cpu
from sonar.ops.table import Activation, AttentionMetadata, AttentionSpec, GGUFMatrix, LayerParts, OpTable, PlainMatrix

SHAPES = {"qkv 960x576": (960, 576), "gate_up 3072x576": (3072, 576), "down 576x1536": (576, 1536)}
LARGE_SHAPES = {"head 49152x576": (49152, 576), "gate_up 17920x1536": (17920, 1536)}


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do a second: bytes read from huge and from small pages, f32 and integer operations."""

    read: float
    read_small_pages: float
    float_ops: float
    integer_ops: float


def median_seconds(call: Callable[[], object], rounds: int, at_least_s: float = 0.02) -> float:
    """Median time of a call, each round long enough to measure."""
    begin = time.perf_counter()
    call()
    repeats = max(1, int(at_least_s / max(time.perf_counter() - begin, 1e-7)))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - begin) / repeats)
    return statistics.median(times)


def measure_ceilings(rounds: int) -> Ceilings:
    """Best of the rounds: a ceiling is what the machine can do, not what it does on average."""
    arithmetic = []
    for kernel in (_cpu.float_ceiling, _cpu.dot_ceiling):
        best = 0.0
        for _ in range(rounds):
            begin = time.perf_counter()
            operations = kernel(1 << 24)
            best = max(best, operations / (time.perf_counter() - begin))
        arithmetic.append(best)
    read, read_small_pages = (_read_rate(advice, rounds) for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE))
    return Ceilings(read, read_small_pages, arithmetic[0], arithmetic[1])


def _read_rate(advice: int, rounds: int) -> float:
    """Bytes a second of memory too large for any cache; the best of the rounds."""
    size = 512 << 20
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    data = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    best = 0.0
    for _ in range(rounds):
        begin = time.perf_counter()
        _cpu.read_ceiling(data.data_ptr(), size)
        best = max(best, size / (time.perf_counter() - begin))
    return best


def random_matrix(type_name: str, num_rows: int, num_columns: int) -> GGUFMatrix:
    """Random bits as weights; halves are kept small so that no scale is infinite."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 256, (num_rows, num_columns // numbers, size), dtype=np.uint8)
    raw[:, :, 1::2] &= 0x2F
    return GGUFMatrix(torch.from_numpy(raw.reshape(num_rows, -1)), type_name, num_columns)


def bench_linear(ceilings: Ceilings, rounds: int) -> None:
    """Few rows are bound by the weights' bytes, many by arithmetic."""
    tables = {mode: cpu.build(torch.device("cpu"), torch.float32, mode) for mode in ("int8", "float32")}
    for type_name in ("Q4_1", "Q8_0", "Q4_K", "Q6_K", "F32"):
        shapes = {**SHAPES, **LARGE_SHAPES} if type_name != "F32" else SHAPES
        for label, (num_rows, num_columns) in shapes.items():
            if type_name.endswith("_K") and num_columns % 256:
                continue
            for mode, ops in tables.items():
                if type_name == "F32" and mode == "int8":
                    continue
                _bench_one_linear(ops, type_name, label, num_rows, num_columns, mode, ceilings, rounds)


def _bench_one_linear(
    ops: OpTable,
    type_name: str,
    label: str,
    num_rows: int,
    num_columns: int,
    mode: str,
    ceilings: Ceilings,
    rounds: int,
) -> None:
    if type_name == "F32":
        linears = [ops.linear([PlainMatrix(torch.randn(num_rows, num_columns))], None)]
        num_bytes = num_rows * num_columns * 4
    else:
        matrix = random_matrix(type_name, num_rows, num_columns)
        num_bytes = matrix.raw_NX.numel()
        # Several copies, so that a call reads memory rather than the cache its predecessor filled.
        linears = [ops.linear([matrix], None) for _ in range(min(64, 1 + (200 << 20) // num_bytes))]
    ceiling = ceilings.integer_ops if mode == "int8" else ceilings.float_ops
    for num_tokens in (1, 4, 16, 512):
        if num_tokens == 512 and num_rows > 4096:
            continue
        x = torch.randn(num_tokens, num_columns)
        turn = iter(range(1 << 60))
        seconds = median_seconds(lambda x=x, turn=turn: linears[next(turn) % len(linears)](x), rounds)  # type: ignore[misc]
        rate, operations = num_bytes / seconds, 2 * num_tokens * num_rows * num_columns / seconds
        print(
            f"{type_name:5} {label:20} {mode:8} rows {num_tokens:4}  {seconds * 1e6:9.1f} us"
            f"  {rate / 1e9:6.1f} GB/s ({rate / ceilings.read:4.0%})"
            f"  {operations / 1e9:7.0f} {'GOP/s' if mode == 'int8' else 'GFLOP/s'} ({operations / ceiling:4.0%})",
            flush=True,
        )


def attention_step(num_queries: list[int], seq_lens: list[int], spec: AttentionSpec) -> tuple[torch.Tensor, ...]:
    """q, cache, block table of requests with their own blocks of 16."""
    blocks = [-(-length // 16) for length in seq_lens]
    cache = torch.randn(sum(blocks), 2, spec.num_kv_heads, 16, spec.head_dim)
    table = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
    first = 0
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    return torch.randn(sum(num_queries), spec.num_heads, spec.head_dim), cache, table


def bench_attention(ceilings: Ceilings, rounds: int) -> None:
    """Decode reads K and V once; a prompt is arithmetic."""
    spec = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    ops = cpu.build(torch.device("cpu"), torch.float32)
    cases = {
        "decode 1 x 512": ([1], [512]),
        "decode 1 x 8192": ([1], [8192]),
        "decode 16 x 512": ([1] * 16, [512] * 16),
        "prompt 512": ([512], [512]),
        "prompt 2048": ([2048], [2048]),
        "chunk 256 of 4096": ([256], [4096]),
    }
    for label, (num_queries, seq_lens) in cases.items():
        q, cache, table = attention_step(num_queries, seq_lens, spec)
        metadata = AttentionMetadata(
            table,
            torch.empty(0, dtype=torch.int64),
            torch.tensor([0, *num_queries]).cumsum(0).to(torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32),
            len(num_queries) if max(num_queries) == 1 else 0,
            max(num_queries),
            max(seq_lens),
        )
        seconds = median_seconds(
            lambda q=q, cache=cache, metadata=metadata: ops.paged_attention(q, cache, metadata, spec),  # type: ignore[misc]
            rounds,
        )
        pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in zip(num_queries, seq_lens, strict=True))
        operations = 4 * pairs * spec.num_heads * spec.head_dim / seconds
        read = sum(seq_lens) * 2 * spec.num_kv_heads * spec.head_dim * 4 / seconds
        print(
            f"attention {label:20} {seconds * 1e6:9.1f} us  {read / 1e9:6.1f} GB/s ({read / ceilings.read:4.0%})"
            f"  {operations / 1e9:7.0f} GFLOP/s ({operations / ceilings.float_ops:4.0%})",
            flush=True,
        )


def bench_rows(ceilings: Ceilings, rounds: int) -> None:
    """The small ops, at one row (call overhead) and at 512."""
    ops = cpu.build(torch.device("cpu"), torch.float32)
    spec = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    weight, cos_sin = torch.ones(576), torch.randn(4096, 64)
    cache = torch.zeros(64, 2, 3, 16, 64)
    for num_tokens in (1, 16, 512):
        x, residual = torch.randn(num_tokens, 576), torch.randn(num_tokens, 576)
        gate_up, qkv = torch.randn(num_tokens, 3072), torch.randn(num_tokens, 960)
        positions, slots = torch.arange(num_tokens), torch.arange(num_tokens)
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "add_rms_norm": (partial(ops.add_rms_norm, x, residual, weight, 1e-5), 4 * 576 * 4),
            "silu gate": (partial(ops.gated_activation, gate_up, Activation.SILU), 3 * 1536 * 4),
            "rope + kv write": (
                partial(ops.rope_kv_write, qkv, positions, cos_sin, None, None, 0.0, cache, slots, spec),
                2 * 960 * 4,
            ),
        }
        for label, (call, row_bytes) in calls.items():
            seconds = median_seconds(call, rounds)
            rate = row_bytes * num_tokens / seconds
            print(
                f"{label:16} rows {num_tokens:4}  {seconds * 1e6:9.1f} us  {rate / 1e9:6.1f} GB/s"
                f" ({rate / ceilings.read:4.0%})",
                flush=True,
            )


def bench_layer(ceilings: Ceilings, rounds: int) -> None:
    """A whole layer of SmolLM2's shape in Q4_1: its weights' bytes, with few rows."""
    spec = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    ops = cpu.build(torch.device("cpu"), torch.float32, "int8")
    assert ops.fused is not None and ops.fused.layer is not None
    matrices = [random_matrix("Q4_1", *shape) for shape in ((960, 576), (576, 576), (3072, 576), (576, 1536))]
    num_bytes = sum(matrix.raw_NX.numel() for matrix in matrices)
    norm, layers = torch.ones(576), []
    for _ in range(48):  # more than the caches hold
        qkv, output, gate_up, down = (ops.linear([matrix], None) for matrix in matrices)
        parts = LayerParts(
            attention_norm_D=norm,
            mlp_norm_D=norm,
            norm_eps=1e-5,
            qkv=qkv,
            output=output,
            cos_sin_PR=torch.randn(4096, 64),
            q_norm_E=None,
            k_norm_E=None,
            head_norm_eps=0.0,
            spec=spec,
            gate_up=gate_up,
            down=down,
            activation=Activation.SILU,
        )
        layers.append(ops.fused.layer(parts))
    for num_tokens in (1, 4, 16):
        ones, last = torch.ones(num_tokens, dtype=torch.int32), torch.full((num_tokens,), 99, dtype=torch.int64)
        _, cache, table = attention_step([1] * num_tokens, [100] * num_tokens, spec)
        metadata = AttentionMetadata(
            table, table[:, 6].long() * 16 + 3, torch.arange(num_tokens + 1, dtype=torch.int32), ones * 100,
            num_tokens, 1, 100,
        )  # fmt: skip
        residual, turn = torch.randn(num_tokens, 576), iter(range(1 << 60))
        seconds = median_seconds(
            lambda a=(residual, last, cache, metadata), turn=turn: layers[next(turn) % len(layers)](*a),  # type: ignore[misc]
            rounds,
        )
        rate, operations = (
            num_bytes / seconds,
            2 * num_tokens * sum(m.shape[0] * m.shape[1] for m in matrices) / seconds,
        )
        print(
            f"layer            rows {num_tokens:4}  {seconds * 1e6:9.1f} us  {rate / 1e9:6.1f} GB/s"
            f" ({rate / ceilings.read:4.0%})  {operations / 1e9:7.0f} GOP/s ({operations / ceilings.integer_ops:4.0%})",
            flush=True,
        )


BENCHES = {"linear": bench_linear, "attention": bench_attention, "rows": bench_rows, "layer": bench_layer}


def main() -> None:
    """Measures the ceilings, then each kind of kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--level", default="", help=f"one of {_cpu.levels()}; the best by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=tuple(BENCHES), default=None)
    arguments = parser.parse_args()
    level = cpu.set_level(arguments.level)
    torch.set_num_threads(arguments.threads)  # the kernels take as many as torch may use
    cpu.set_num_threads(arguments.threads)
    ceilings = measure_ceilings(arguments.rounds)
    print(
        f"level {level}, {arguments.threads} threads: read {ceilings.read / 1e9:.1f} GB/s, "
        f"f32 {ceilings.float_ops / 1e9:.0f} GFLOP/s, integer {ceilings.integer_ops / 1e9:.0f} GOP/s",
        flush=True,
    )
    for name, bench in BENCHES.items():
        if arguments.only in (None, name):
            bench(ceilings, arguments.rounds)


if __name__ == "__main__":
    main()
