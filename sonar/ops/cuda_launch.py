"""What the Triton kernels of this package share: dependent launch, and shapes rounded to powers of two.

**Programmatic dependent launch** (compute capability 9.0 on): a kernel of a stream may start while the one before it
still runs, and waits inside, at `wait_for_inputs`, until that one's writes are visible. What comes before the wait
overlaps the end of the kernel before: launch latency always, and loads of weights, which no kernel writes. Every kernel
launched with it must wait before it reads what another kernel wrote *and before it writes anything*, or a write could
overtake a read two kernels back. Called by the `cuda_*` modules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_PDL_CAPABILITY = (9, 0)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Lets the next kernel start, and waits until all writes of the ones before are visible."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def supports_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on this device may be launched with `launch_pdl`; never on ROCm."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= _PDL_CAPABILITY


def power_of_two(number: int, at_least: int = 1) -> int:
    """The smallest power of two that is neither below `number` nor below `at_least`."""
    return max(at_least, 1 << (number - 1).bit_length())


def ceil_div(number: int, divisor: int) -> int:
    """Quotient, rounded up."""
    return -(-number // divisor)
