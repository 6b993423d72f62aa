"""Feed-forward layers. Called by the models, which load their linears (names and fusing differ by family)."""

from __future__ import annotations

from torch import Tensor

from sonar.errors import ModelError
from sonar.layers.norms import RmsNorm
from sonar.ops.table import Activation, FusedOps, LinearFn, OpTable

# Hugging Face's `hidden_act` names; three of them are one formula, the tanh approximation.
ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def find_activation(name: str) -> Activation:
    """The activation of a `hidden_act` name.

    Raises:
        ModelError: unknown; lists what is known.
    """
    if name not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; known are {sorted(ACTIVATIONS)}", param="activation")
    return ACTIVATIONS[name]


class GatedMlp:
    """down(activation(gate(x)) * up(x)). gate_up: one linear of 2 F outputs, gate first."""

    def __init__(self, ops: OpTable, gate_up: LinearFn, down: LinearFn, activation: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._gated_activation = ops.gated_activation

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Returns a new (T, D) tensor."""
        return self.down(self._gated_activation(self.gate_up(x_TD), self.activation))

    def add_fused(self, residual_TD: Tensor, norm: RmsNorm, fused: FusedOps) -> None:
        """residual += mlp(norm(residual)), in place."""
        x_TF = fused.norm_gated_linear(self.gate_up, residual_TD, norm.weight_D, norm.eps, self.activation)
        fused.linear_add(self.down, x_TF, residual_TD)


class Mlp:
    """down(activation(up(x)))."""

    def __init__(self, ops: OpTable, up: LinearFn, down: LinearFn, activation: Activation) -> None:
        self._up = up
        self._down = down
        self._kind = activation
        self._activation = ops.activation

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Returns a new (T, D) tensor."""
        return self._down(self._activation(self._up(x_TD), self._kind))
