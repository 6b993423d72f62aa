"""Gated activation as one Triton kernel: reads gate and up once, writes their product.

Computed in float32, rounded once (the reference rounds the activation, then the product). Built into its table by
`sonar.ops.cuda`; the activation without a gate is the reference's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonar.ops.cuda_launch import ceil_div, wait_for_inputs
from sonar.ops.table import Activation

_BLOCK = 1024
_KINDS = {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2}


@triton.jit
def activate(x, KIND: tl.constexpr):
    """x in float32 -> its activation; KIND: 0 SiLU, 1 GELU, 2 GELU's tanh approximation."""
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    if KIND == 1:
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * inner))


@triton.jit
def _gated_kernel(x_ptr, out_ptr, x_stride, num_features, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_features
    wait_for_inputs(PDL)
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + num_features + columns, mask=mask, other=0.0).to(tl.float32)
    out = activate(gate, KIND) * up
    tl.store(out_ptr + row * num_features + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def activation_kind(activation: Activation) -> int:
    """The number by which kernels know an activation (`activate`)."""
    return _KINDS[activation]


class GatedActivations:
    """`GatedActivationFn`. has_pdl: launch dependently (`sonar.ops.cuda_launch`)."""

    def __init__(self, *, has_pdl: bool) -> None:
        self._has_pdl = has_pdl

    def gated_activation(self, gate_up_TF2: Tensor, activation: Activation) -> Tensor:
        """See `sonar.ops.table.GatedActivationFn`."""
        num_rows, num_features = gate_up_TF2.shape[0], gate_up_TF2.shape[1] // 2
        assert gate_up_TF2.stride(1) == 1, f"rows of stride {gate_up_TF2.stride(1)}"
        out_TF = torch.empty((num_rows, num_features), dtype=gate_up_TF2.dtype, device=gate_up_TF2.device)
        if num_rows:
            _gated_kernel[(num_rows, ceil_div(num_features, _BLOCK))](
                gate_up_TF2,
                out_TF,
                gate_up_TF2.stride(0),
                num_features,
                KIND=_KINDS[activation],
                BLOCK=_BLOCK,
                PDL=self._has_pdl,
                num_warps=4,
                **({"launch_pdl": True} if self._has_pdl else {}),
            )
        return out_TF
