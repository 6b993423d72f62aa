"""Norms in plain torch, computed in float32. Built into the reference table by `sonar.ops.reference`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `sonar.ops.table.RmsNormFn`; x may have any leading dimensions."""
    x_float = x_TD.to(torch.float32)
    return F.rms_norm(x_float, weight_D.shape, weight_D.to(torch.float32), eps).to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `sonar.ops.table.AddRmsNormFn`."""
    residual_TD += x_TD
    return rms_norm(residual_TD, weight_D, eps)


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """See `sonar.ops.table.LayerNormFn`."""
    weight_float, bias_float = weight_D.to(torch.float32), bias_D.to(torch.float32)
    return F.layer_norm(x_TD.to(torch.float32), weight_D.shape, weight_float, bias_float, eps).to(x_TD.dtype)
