"""The `cpu` backend: the compiled kernels of csrc/cpu behind the op table.

Batch-invariant: a row's bits depend on that row alone, and are the same at the AVX2 and AVX-512 levels. Computes in
float32; tensors of another compute dtype are widened at each op and rounded once after it. Knows nothing of models.
Called by `sonar.ops.registry`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.config import ActivationMode
from sonar.ops.registry import OpsUnavailable
from sonar.ops.table import Activation, FusedOps, LinearFn, OpTable

try:
    # Before the modules below, which import it themselves: whichever is first decides what the error is.
    from sonar.ops import _cpu
except ImportError as _error:
    raise OpsUnavailable(f"the compiled module is missing: {_error}; install with a C++ compiler present") from _error

from sonar.ops.cpu_attention import paged_attention, rope_attention, rope_kv_write
from sonar.ops.cpu_layer import MAX_ROWS, CpuLayer
from sonar.ops.cpu_matrix import CpuLinear, MatrixOps
from sonar.ops.cpu_rows import activation, add_rms_norm, gated_activation, layer_norm, rms_norm
from sonar.ops.cpu_sample import sample
from sonar.ops.reference_experts import PerExpert, route, sort_by_expert, weighted_sum
from sonar.ops.reference_latent import LatentOps

# Fusing saves calls and passes at every size, and changes no bit.
_ANY_ROWS = 1 << 30


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
    latent = LatentOps(rms_norm, paged_attention)
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
        route=route,
        sort_by_expert=sort_by_expert,
        weighted_sum=weighted_sum,
        experts=PerExpert(matrices.linear, gated_activation).experts,
        head_linear=matrices.head_linear,
        latent_write=latent.write,
        latent_attention=latent.attention,
        fused=FusedOps(_ANY_ROWS, _norm_linear, _norm_gated_linear, _linear_add, rope_attention, CpuLayer, MAX_ROWS)
        if dtype is torch.float32
        else None,
    )


def _norm_linear(linear: LinearFn, x_TD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    assert isinstance(linear, CpuLinear)
    return linear.norm(x_TD, norm_D, eps)


def _norm_gated_linear(linear: LinearFn, x_TD: Tensor, norm_D: Tensor, eps: float, activation: Activation) -> Tensor:
    assert isinstance(linear, CpuLinear)
    return linear.norm_gated(x_TD, norm_D, eps, activation)


def _linear_add(linear: LinearFn, x_TK: Tensor, residual_TD: Tensor) -> None:
    assert isinstance(linear, CpuLinear)
    linear.add_to(x_TK, residual_TD)


def set_num_threads(num_threads: int) -> None:
    """Threads of the kernels' pool, the caller's included; for the whole process."""
    _cpu.set_num_threads(num_threads)


def set_level(name: str) -> str:
    """Chooses an instruction set level for the whole process; "" is the best. For tests and benchmarks.

    Raises:
        ValueError: not among `_cpu.levels()`.
    """
    return _cpu.set_level(name)
