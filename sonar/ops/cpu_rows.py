"""Norms and activations over rows, on the compiled kernels. Built into its table by `sonar.ops.cpu`.

Knows of dtypes and strides what the kernels do not: they take float32 rows with contiguous numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.ops import _cpu
from sonar.ops.table import Activation

ACTIVATION_KINDS = {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2}


def as_float32(x: Tensor) -> Tensor:
    """x itself if it is contiguous float32, else such a copy."""
    if x.dtype is not torch.float32:
        x = x.to(torch.float32)
    return x if x.is_contiguous() else x.contiguous()


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `sonar.ops.table.RmsNormFn`."""
    x, weight = as_float32(x_TD), as_float32(weight_D)
    out, size = torch.empty_like(x), x.shape[-1]
    _cpu.rms_norm(x.data_ptr(), size, weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps)
    return out if x_TD.dtype is torch.float32 else out.to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `sonar.ops.table.AddRmsNormFn`."""
    if residual_TD.dtype is not torch.float32 or not residual_TD.is_contiguous():
        residual_TD.add_(x_TD)
        return rms_norm(residual_TD, weight_D, eps)
    x, weight = as_float32(x_TD), as_float32(weight_D)
    out, size = torch.empty_like(residual_TD), x.shape[-1]
    residual = residual_TD.data_ptr()
    _cpu.add_rms_norm(
        x.data_ptr(), size, residual, size, weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps
    )
    return out


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """See `sonar.ops.table.LayerNormFn`."""
    x, weight, bias = as_float32(x_TD), as_float32(weight_D), as_float32(bias_D)
    out, size = torch.empty_like(x), x.shape[-1]
    _cpu.layer_norm(
        x.data_ptr(), size, weight.data_ptr(), bias.data_ptr(), out.data_ptr(), x.numel() // size, size, eps
    )
    return out if x_TD.dtype is torch.float32 else out.to(x_TD.dtype)


def gated_activation(gate_up_TF2: Tensor, activation: Activation) -> Tensor:
    """See `sonar.ops.table.GatedActivationFn`."""
    x = as_float32(gate_up_TF2)
    num_rows, both = x.shape
    out = torch.empty((num_rows, both // 2))
    gate = x.data_ptr()
    _cpu.activation(ACTIVATION_KINDS[activation], gate, both, gate + 2 * both, out.data_ptr(), num_rows, both // 2)
    return out if gate_up_TF2.dtype is torch.float32 else out.to(gate_up_TF2.dtype)


def activation(x_TF: Tensor, activation: Activation) -> Tensor:
    """See `sonar.ops.table.ActivationFn`."""
    x = as_float32(x_TF)
    out, size = torch.empty_like(x), x.shape[-1]
    _cpu.activation(ACTIVATION_KINDS[activation], x.data_ptr(), size, 0, out.data_ptr(), x.numel() // size, size)
    return out if x_TF.dtype is torch.float32 else out.to(x_TF.dtype)
