"""What the card itself can do: copy bandwidth and matrix rate, the measures that all figures are held against.

Run on a GPU: `python -m benchmarks.gpu.ceilings`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch


class Ceilings(NamedTuple):
    """Bytes a second of a device-to-device copy (read + written), and FLOP a second of a large bf16 product."""

    copy_bytes_s: float
    bf16_flop_s: float


def time_s(function: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of one call, by device events, after three calls to warm up."""
    for _ in range(3):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return float(times[len(times) // 2]) / 1e3


def time_in_graph_s(function: Callable[[int], object], calls: int = 50, repeats: int = 5) -> float:
    """Mean seconds of one call among `calls` captured in one graph; function is told the call's number, so that it can
    take another input each time and find no cache warm."""
    function(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            function(i)
    return time_s(graph.replay, repeats) / calls


def measure() -> Ceilings:
    """Measures both in about a second."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = time_s(partial(target.copy_, source))
    del source, target
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product_s = time_s(lambda: a @ b)
    return Ceilings(2 * (1 << 31) / copy_s, 2 * 8192**3 / product_s)


if __name__ == "__main__":
    found = measure()
    print(f"copy {found.copy_bytes_s / 1e12:.2f} TB/s, bf16 product {found.bf16_flop_s / 1e12:.0f} TFLOP/s")
