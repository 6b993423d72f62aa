"""Norms and activations of the CPU backend against formulas in float64, at every level."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sonar.ops.table import Activation
from tests.ops.cpu_case import LEVELS, at_level, build

SIZES = [(1, 1), (3, 7), (2, 16), (5, 576), (2, 1001), (300, 65)]
FORMULAS = {
    Activation.SILU: lambda x: x * x.sigmoid(),
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
}


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SIZES)
def test_norms(shape: tuple[int, int], level: str) -> None:
    x_TD, residual_TD = _random(*shape, seed=0), _random(*shape, seed=1)
    weight_D, bias_D, before = _random(shape[1], seed=2), _random(shape[1], seed=3), x_TD.clone()
    total = x_TD + residual_TD
    with at_level(level):
        ops = build()
        rms = ops.rms_norm(x_TD, weight_D, 1e-5)
        added = ops.add_rms_norm(x_TD, residual_TD, weight_D, 1e-6)
        layer = ops.layer_norm(x_TD, weight_D, bias_D, 1e-5)
    assert x_TD.equal(before) and residual_TD.equal(total)
    tolerance = {"rtol": 2e-6, "atol": 1e-6}
    torch.testing.assert_close(rms.double(), _rms(x_TD, weight_D, 1e-5), **tolerance)
    torch.testing.assert_close(added.double(), _rms(total, weight_D, 1e-6), **tolerance)
    centred = x_TD.double() - x_TD.double().mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight_D.double() + bias_D.double()
    torch.testing.assert_close(layer.double(), expected, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", list(Activation))
def test_activations(kind: Activation, level: str) -> None:
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 90.0, -90.0, 300.0, -300.0, 1e30, -1e30])
    x_TF = torch.cat([torch.linspace(-12, 12, 4001), special]).unsqueeze(0)
    with at_level(level):
        actual = build().activation(x_TF, kind)
    torch.testing.assert_close(actual.double(), FORMULAS[kind](x_TF.double()), rtol=1e-6, atol=4e-7)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SIZES)
def test_gated_activations(shape: tuple[int, int], level: str) -> None:
    gate_TF, up_TF = _random(*shape, seed=0), _random(*shape, seed=1)
    for kind, formula in FORMULAS.items():
        with at_level(level):
            actual = build().gated_activation(torch.cat([gate_TF, up_TF], dim=1), kind)
        torch.testing.assert_close(actual.double(), formula(gate_TF.double()) * up_TF.double(), rtol=2e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_and_rounded_once(dtype: torch.dtype) -> None:
    ops, x_TD, weight_D = build(dtype=dtype), _random(4, 70, seed=0).to(dtype), _random(70, seed=1).to(dtype)
    eps = torch.finfo(dtype).eps
    rms = ops.rms_norm(x_TD, weight_D, 1e-5)
    assert rms.dtype == dtype
    torch.testing.assert_close(rms.double(), _rms(x_TD, weight_D, 1e-5), rtol=eps, atol=eps)
    residual_TD = _random(4, 70, seed=2).to(dtype)
    total = (x_TD.float() + residual_TD.float()).to(dtype)
    assert ops.add_rms_norm(x_TD, residual_TD, weight_D, 1e-5).dtype == dtype
    assert residual_TD.equal(total)
    assert ops.gated_activation(x_TD, Activation.SILU).dtype == dtype
    assert ops.activation(x_TD, Activation.GELU).dtype == dtype
    assert ops.layer_norm(x_TD, weight_D, weight_D, 1e-5).dtype == dtype


def test_inputs_need_not_be_contiguous() -> None:
    ops, wide = build(), _random(9, 200, seed=0)
    view, weight_D = wide[:, 50:114], _random(64, seed=1)
    assert ops.rms_norm(view, weight_D, 1e-5).equal(ops.rms_norm(view.contiguous(), weight_D, 1e-5))
    residual_TD = wide[:, 100:164]
    expected = residual_TD + view
    ops.add_rms_norm(view.clone(), residual_TD, weight_D, 1e-5)
    assert wide[:, 100:164].equal(expected)
