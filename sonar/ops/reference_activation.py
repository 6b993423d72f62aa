"""Activations in plain torch. Built into the reference table by `sonar.ops.reference`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sonar.ops.table import Activation


def activation(x_TF: Tensor, activation: Activation) -> Tensor:
    """See `sonar.ops.table.ActivationFn`."""
    match activation:
        case Activation.SILU:
            return F.silu(x_TF)
        case Activation.GELU:
            return F.gelu(x_TF)
        case Activation.GELU_TANH:
            return F.gelu(x_TF, approximate="tanh")


def gated_activation(gate_up_TF2: Tensor, activation: Activation) -> Tensor:
    """See `sonar.ops.table.GatedActivationFn`."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return _activate(gate_TF, activation).mul_(up_TF)


_activate = activation
