"""Which tiles, or cuBLAS, serve a product of few rows: measured per shape and device, in `cuda_tiles.json` beside this.

`python -m benchmarks.gpu.tune` measures and writes the file; a shape it does not know gets the rule that fits its
neighbours. Called by `sonar.ops.cuda_linear` at load.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonar.ops.cuda_launch import power_of_two

TILES_PATH = Path(__file__).with_name("cuda_tiles.json")
_PROGRAMS = 132


@dataclass(frozen=True)
class OneRowTiles:
    """Tiles of `one_row_kernel`: outputs and inputs a program holds at a time."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class FewRowsTiles:
    """Tiles of `few_rows_kernel`; split_k programs share a tile of outputs."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


def tile_key(num_rows: int, num_out: int, num_in: int, kind: str) -> str:
    """Name of an entry. num_rows: 1, 8 (for 2 to 8) or 16 (for 9 to 16). kind: "plain", "norm", "gate" or "add"."""
    return f"{num_rows} x {num_out} x {num_in} {kind}"


class TileTable:
    """The measured choices for one device.

    Args:
        device_name: as torch names it; entries of another device are not used.
    """

    def __init__(self, device_name: str, path: Path = TILES_PATH) -> None:
        entries: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        self._entries = entries.get(device_name, {})

    def one_row(self, num_out: int, num_in: int, kind: str) -> OneRowTiles:
        """Tiles for one row."""
        entry = self._entries.get(tile_key(1, num_out, num_in, kind))
        return OneRowTiles(**entry) if entry else default_one_row(num_out, num_in)

    def few_rows(self, num_rows: int, num_out: int, num_in: int, kind: str) -> FewRowsTiles | None:
        """Tiles for 2 to 16 rows; None: cuBLAS and separate kernels are faster, or nobody has measured."""
        entry = self._entries.get(tile_key(8 if num_rows <= 8 else 16, num_out, num_in, kind))
        return FewRowsTiles(**entry) if entry else None


def default_one_row(num_out: int, num_in: int) -> OneRowTiles:
    """What most shapes were fastest with: rows whole, a tile of 8,192 or 16,384 numbers, programs for every
    multiprocessor."""
    block_k = min(power_of_two(num_in, 128), 4096)
    fair = power_of_two(max(1, num_out // (2 * _PROGRAMS)))
    block_n = max(1, min(16384 // block_k, fair, 8))
    return OneRowTiles(block_n, block_k, 8 if block_n * block_k >= 16384 else 4)
