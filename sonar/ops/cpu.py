"""The `cpu` backend: the compiled kernels of csrc/cpu behind the op table.

Batch-invariant: a row's bits depend on that row alone, and are the same at the AVX2 and AVX-512 levels. Computes in
float32; tensors of another compute dtype are widened at each op and rounded once after it. Knows nothing of models.
Called by `sonar.ops.registry`.
"""

from __future__ import annotations

import torch

from sonar.config import ActivationMode
from sonar.ops.registry import OpsUnavailable
from sonar.ops.table import OpTable

try:
    # Before the modules below, which import it themselves: whichever is first decides what the error is.
    from sonar.ops import _cpu
except ImportError as _error:
    raise OpsUnavailable(f"the compiled module is missing: {_error}; install with a C++ compiler present") from _error

from sonar.ops.cpu_attention import paged_attention, rope_kv_write
from sonar.ops.cpu_matrix import MatrixOps
from sonar.ops.cpu_rows import activation, add_rms_norm, gated_activation, layer_norm, rms_norm
from sonar.ops.cpu_sample import sample


def build(device: torch.device, dtype: torch.dtype, activations: ActivationMode = "auto") -> OpTable:
    """The ops of this machine's best instruction set, on as many threads as torch may use when this is called.

    Args:
        dtype: of the activations, float32 for speed.
        activations: what quantized weights are multiplied with. "int8": 8 bits a number with a scale for each 32, in
            integer arithmetic; "float32": as they are. "auto" is float32.

    Raises:
        OpsUnavailable: another device than the CPU.
    """
    if device.type != "cpu":
        raise OpsUnavailable(f"these kernels run on the CPU, not on {device}")
    set_num_threads(torch.get_num_threads())
    matrices = MatrixOps(dtype, is_int8=activations == "int8")
    return OpTable(
        name=f"cpu ({_cpu.level()}, {'int8' if activations == 'int8' else 'float32'} activations)",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        layer_norm=layer_norm,
        rope_kv_write=rope_kv_write,
        paged_attention=paged_attention,
        gated_activation=gated_activation,
        activation=activation,
        linear=matrices.linear,
        embedding=matrices.embedding,
        sample=sample,
    )


def set_num_threads(num_threads: int) -> None:
    """Threads of the kernels' pool, the caller's included; for the whole process."""
    _cpu.set_num_threads(num_threads)


def set_level(name: str) -> str:
    """Chooses an instruction set level for the whole process; "" is the best. For tests and benchmarks.

    Raises:
        ValueError: not among `_cpu.levels()`.
    """
    return _cpu.set_level(name)
