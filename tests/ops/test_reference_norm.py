"""Norms and activations against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sonar.ops.reference import build
from sonar.ops.table import Activation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (3, 7), (5, 576), (2, 1001)]
OPS = build(torch.device("cpu"), torch.float32)


def _close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to one rounding to the actual dtype."""
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=max(eps, 2e-6), atol=max(eps / 16, 1e-6))


def _random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x_TD, weight_D = _random(*shape, dtype=dtype, seed=0), _random(shape[1], dtype=dtype, seed=1)
    before = x_TD.clone()
    actual = OPS.rms_norm(x_TD, weight_D, 1e-5)
    assert actual.dtype == dtype and x_TD.equal(before)
    _close(actual, _rms(x_TD, weight_D, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_add_rms_norm_adds_in_place(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x_TD, residual_TD = _random(*shape, dtype=dtype, seed=0), _random(*shape, dtype=dtype, seed=1)
    weight_D, x_before = _random(shape[1], dtype=dtype, seed=2), x_TD.clone()
    total = (x_TD.double() + residual_TD.double()).to(dtype)
    actual = OPS.add_rms_norm(x_TD, residual_TD, weight_D, 1e-6)
    assert residual_TD.equal(total) and x_TD.equal(x_before)
    _close(actual, _rms(total, weight_D, 1e-6))


def test_rms_norm_of_large_half_values_does_not_overflow() -> None:
    x_TD = torch.full((1, 8), 60_000.0, dtype=torch.float16)
    assert OPS.rms_norm(x_TD, torch.ones(8, dtype=torch.float16), 1e-6).tolist() == [[1.0] * 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_layer_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x_TD = _random(*shape, dtype=dtype, seed=0)
    weight_D, bias_D = _random(shape[1], dtype=dtype, seed=1), _random(shape[1], dtype=dtype, seed=2)
    actual = OPS.layer_norm(x_TD, weight_D, bias_D, 1e-5)
    x = x_TD.double()
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    expected = centred / (variance + 1e-5).sqrt() * weight_D.double() + bias_D.double()
    assert actual.dtype == dtype
    _close(actual, expected)


def _activate(value: float, kind: Activation) -> float:
    match kind:
        case Activation.SILU:
            return value / (1 + math.exp(-value))
        case Activation.GELU:
            return value * 0.5 * (1 + math.erf(value / math.sqrt(2)))
        case Activation.GELU_TANH:
            return 0.5 * value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(Activation))
def test_activations(kind: Activation, dtype: torch.dtype) -> None:
    x_TF = _random(3, 37, dtype=dtype, seed=0)
    before = x_TF.clone()
    expected = x_TF.double().apply_(lambda value: _activate(value, kind))
    actual = OPS.activation(x_TF, kind)
    assert actual.dtype == dtype and x_TF.equal(before)
    _close(actual, expected)


@pytest.mark.parametrize("kind", list(Activation))
def test_gated_activation_takes_the_gate_first(kind: Activation) -> None:
    gate_up_TF2 = _random(3, 2 * 19, dtype=torch.float32, seed=0)
    before = gate_up_TF2.clone()
    gate, up = gate_up_TF2[:, :19].double(), gate_up_TF2[:, 19:].double()
    expected = gate.apply_(lambda value: _activate(value, kind)) * up
    actual = OPS.gated_activation(gate_up_TF2, kind)
    assert actual.shape == (3, 19) and gate_up_TF2.equal(before)
    _close(actual, expected)
