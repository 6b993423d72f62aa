"""Measures which tiles, or cuBLAS, serve the products of few rows fastest, and writes `sonar/ops/cuda_tiles.json`.

    python -m benchmarks.gpu.tune            # compiles in parallel, then measures one shape after the other

Weights rotate among copies larger than the L2. A fused product is held against cuBLAS with the kernels that it spares.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.ceilings import time_in_graph_s
from benchmarks.gpu.kernels import BF16, DEVICE, attempt
from sonar.ops.cuda_launch import supports_dependent_launch
from sonar.ops.cuda_linear import CudaLinear, Fusion, LinearParts
from sonar.ops.cuda_tiles import TILES_PATH, FewRowsTiles, OneRowTiles, tile_key
from sonar.ops.table import Activation

Tiles = OneRowTiles | FewRowsTiles
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


def candidates(num_rows: int, num_in: int, kind: str) -> list[Tiles]:
    """What is tried for a shape."""
    if num_rows == 1:
        if num_in <= 1024:
            sizes = [(4, 1024, 4), (8, 1024, 4), (8, 512, 4), (8, 512, 8), (16, 512, 4), (16, 1024, 8)]
        else:
            sizes = [(2, 4096, 4), (4, 4096, 8), (4, 2048, 4), (8, 2048, 8), (16, 512, 8), (8, 1024, 4), (4, 4096, 4)]
        if num_in > 4096:
            sizes += [(2, 8192, 8), (2, 2048, 4), (8, 512, 4), (4, 1024, 4)]
        return [OneRowTiles(*size) for size in sizes]
    few = [(16, 256, 1, 4, 4), (32, 128, 1, 4, 5), (32, 256, 1, 4, 4), (64, 128, 1, 4, 4), (16, 512, 1, 4, 3)]
    if kind != "gate":
        few += [(16, 256, 2, 4, 3), (32, 256, 2, 4, 4), (64, 128, 4, 4, 4), (16, 512, 1, 8, 3)]
    return [FewRowsTiles(*size) for size in few]


class ShapeBench:
    """Launches the product of one shape in every way; name and shape as in `SHAPES`."""

    def __init__(self, name: str, num_out: int, num_in: int, kind: str, *, num_copies: int | None = None) -> None:
        self.name, self.num_in, self.kind = name, num_in, kind
        self.fused_out = num_out // (2 if kind == "gate" else 1)
        self.size_bytes = 2 * num_out * num_in
        parts = LinearParts(DEVICE, has_pdl=supports_dependent_launch(DEVICE))
        self._layers = [CudaLinear(weight, None, parts) for weight in copies_of(num_out, num_in)[:num_copies]]
        self._calls = 60 if self.size_bytes < 50e6 else 12

    def rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, Fusion]:
        """Input, output and fusion of so many rows."""
        x = torch.randn(num_rows, self.num_in, device=DEVICE, dtype=BF16)
        fusion = fusion_of(self.kind, num_rows, self.fused_out, self.num_in)
        out = torch.empty(num_rows, self.fused_out, device=DEVICE, dtype=BF16)
        return x, out if fusion.residual_MN is None else fusion.residual_MN, fusion

    def launch(self, tiles: Tiles, x: torch.Tensor, out: torch.Tensor, fusion: Fusion, call: int) -> None:
        """By our kernel."""
        layer = self._layers[call % len(self._layers)]
        if isinstance(tiles, OneRowTiles):
            layer.launch_one_row(x, out, fusion, tiles)
        else:
            layer.launch_few_rows(x, out, fusion, tiles)

    def apart(self, x: torch.Tensor, fusion: Fusion, call: int) -> None:
        """By cuBLAS and separate kernels."""
        self._layers[call % len(self._layers)].apply_apart(x, fusion)

    def time_s(self, launch: Callable[[int], None]) -> float:
        """Seconds of one launch in a graph."""
        return time_in_graph_s(launch, self._calls, 3)

    def row_counts(self) -> tuple[int, ...]:
        """Rows that are tuned: of a head only one, several are cuBLAS's."""
        return (1, 8, 16) if self.kind else (1,)


def compile_shape(bench: ShapeBench) -> None:
    """Launches everything once, which leaves it in Triton's cache."""
    for num_rows in bench.row_counts():
        x, out, fusion = bench.rows(num_rows)
        for tiles in candidates(num_rows, bench.num_in, bench.kind):
            attempt(partial(_launch_once, bench, tiles, x, out, fusion))


def _launch_once(bench: ShapeBench, tiles: Tiles, x: torch.Tensor, out: torch.Tensor, fusion: Fusion) -> float:
    bench.launch(tiles, x, out, fusion, 0)
    return 0.0


def tune_shape(bench: ShapeBench) -> dict[str, dict[str, Any]]:
    """Entries of one shape, for 1, 8 and 16 rows."""
    found: dict[str, dict[str, Any]] = {}
    for num_rows in bench.row_counts():
        x, out, fusion = bench.rows(num_rows)
        cublas_s = bench.time_s(partial(bench.apart, x, fusion))
        timed = [
            (attempt(partial(bench.time_s, partial(bench.launch, tiles, x, out, fusion))), tiles)
            for tiles in candidates(num_rows, bench.num_in, bench.kind)
        ]
        best_s, best = min(timed, key=lambda pair: pair[0])
        print(
            f"{bench.name:14} {num_rows:2} rows: cuBLAS and separate {1e6 * cublas_s:6.2f} us, "
            f"own {1e6 * best_s:6.2f} us {bench.size_bytes / best_s / 1e12:5.2f} TB/s {best}",
            flush=True,
        )
        if num_rows == 1 or best_s < cublas_s:
            key = tile_key(num_rows, bench.fused_out, bench.num_in, bench.kind or "plain")
            found[key] = dataclasses.asdict(best)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Tunes all shapes, or compiles those of one (in a process of its own)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", type=int, default=-1)
    options = parser.parse_args(arguments)
    if options.compile >= 0:
        compile_shape(ShapeBench(*SHAPES[options.compile], num_copies=1))
        return 0
    children = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.tune", "--compile", str(i)]) for i in range(len(SHAPES))
    ]
    for child in children:
        child.wait()
    entries: dict[str, dict[str, Any]] = {}
    for shape in SHAPES:
        entries |= tune_shape(ShapeBench(*shape))
        known = json.loads(TILES_PATH.read_text()) if TILES_PATH.exists() else {}
        known[torch.cuda.get_device_name()] = entries
        TILES_PATH.write_text(json.dumps(known, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
