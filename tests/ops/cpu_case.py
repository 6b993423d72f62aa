"""What tests of the CPU kernels share: levels, random quantized matrices and their numbers by the `gguf` package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from sonar.config import ActivationMode
from sonar.ops.table import GGUFMatrix, OpTable

_cpu = pytest.importorskip("sonar.ops._cpu", reason="the CPU kernels are not built here")

from sonar.ops import cpu  # noqa: E402 (only where they are built)

__all__ = [
    "CPU",
    "K_TYPES",
    "LEGACY_TYPES",
    "LEVELS",
    "at_level",
    "build",
    "cpu",
    "dense",
    "random_matrix",
    "with_threads",
]

LEVELS = _cpu.levels()
CPU = torch.device("cpu")
LEGACY_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# Where a block's halves lie, each with the range it is drawn from: scales first, then minimums.
_HALVES = {
    "Q4_0": {0: (-0.02, 0.02)},
    "Q4_1": {0: (0.01, 0.02), 2: (-0.2, 0.0)},
    "Q5_0": {0: (-0.01, 0.01)},
    "Q5_1": {0: (0.005, 0.01), 2: (-0.2, 0.0)},
    "Q8_0": {0: (0.0005, 0.001)},
    "Q2_K": {80: (0.01, 0.02), 82: (0.01, 0.02)},
    "Q3_K": {108: (-0.002, 0.002)},
    "Q4_K": {0: (0.0005, 0.001), 2: (0.0005, 0.001)},
    "Q5_K": {0: (0.0005, 0.001), 2: (0.0005, 0.001)},
    "Q6_K": {208: (-0.0005, 0.0005)},
}


def random_matrix(type_name: str, num_rows: int, num_columns: int, seed: int = 0) -> GGUFMatrix:
    """Every bit of the quants and sub-scales random; halves in a range that weights have."""
    generator = np.random.default_rng(seed)
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    raw = generator.integers(0, 256, (num_rows, num_columns // numbers, size), dtype=np.uint8)
    for at, (low, high) in _HALVES[type_name].items():
        halves = generator.uniform(low, high, (*raw.shape[:2], 1)).astype(np.float16)
        raw[:, :, at : at + 2] = halves.view(np.uint8)
    return GGUFMatrix(torch.from_numpy(raw.reshape(num_rows, -1)), type_name, num_columns)


def dense(matrix: GGUFMatrix) -> Tensor:
    """Its numbers, float32, as the `gguf` package reads them."""
    kind = GGMLQuantizationType[matrix.type_name]
    return torch.from_numpy(quants.dequantize(matrix.raw_NX.numpy(), kind))


def build(mode: ActivationMode = "float32", dtype: torch.dtype = torch.float32) -> OpTable:
    """The backend's table on two threads, whatever torch uses."""
    table = cpu.build(CPU, dtype, mode)
    _cpu.set_num_threads(2)
    return table


@contextmanager
def at_level(name: str) -> Iterator[None]:
    """Runs the kernels at a level; the best one again afterwards."""
    _cpu.set_level(name)
    try:
        yield
    finally:
        _cpu.set_level("")


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Runs the kernels on so many threads; as many as before afterwards."""
    before = _cpu.num_threads()
    _cpu.set_num_threads(count)
    try:
        yield
    finally:
        _cpu.set_num_threads(before)
