"""What layers do beyond calling an op: stacking, biases, tying, offsets, names of activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonar.errors import ModelError
from sonar.layers.embedding import VocabTables
from sonar.layers.linear import Part, load_linear
from sonar.layers.mlp import find_activation
from sonar.layers.norms import RmsNorm
from sonar.ops.reference import build
from sonar.ops.table import Activation, Matrix, PlainMatrix

OPS = build(torch.device("cpu"), torch.float32)


class _Weights:
    """Random tensors of whatever shape is asked for; remembers their names."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.given: dict[str, Tensor] = {}
        self._dtype = dtype

    def has(self, name: str) -> bool:
        return False

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.given[name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(self.given))).to(self._dtype)
        return self.given[name]

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        return PlainMatrix(self.tensor(name, shape))

    def unread(self) -> list[str]:
        return []


def test_linear_stacks_parts_and_biases_in_order() -> None:
    weights = _Weights()
    linear = load_linear(weights, OPS, [Part("q", 5), Part("k", 2)], 3, bias=True)
    x_TK = torch.randn(4, 3)
    parts = [x_TK @ weights.given[f"{n}.weight"].T + weights.given[f"{n}.bias"] for n in ("q", "k")]
    torch.testing.assert_close(linear(x_TK), torch.cat(parts, dim=1))


def test_linear_without_bias_asks_for_none() -> None:
    weights = _Weights()
    load_linear(weights, OPS, [Part("o", 5)], 3)
    assert list(weights.given) == ["o.weight"]


@pytest.mark.parametrize("tied", [True, False])
def test_head_is_the_embedding_only_when_tied(tied: bool) -> None:
    weights = _Weights()
    names = {"embedding_name": "e.weight", "head_name": "h.weight"}
    tables = VocabTables(weights, OPS, **names, vocab_size=7, hidden_size=3, tied=tied)
    assert list(weights.given) == (["e.weight"] if tied else ["e.weight", "h.weight"])
    x_SD = torch.randn(2, 3)
    torch.testing.assert_close(tables.head(x_SD), x_SD @ weights.given["e.weight" if tied else "h.weight"].T)
    assert tables.embed(torch.tensor([6, 0])).equal(weights.given["e.weight"][[6, 0]])


def test_norm_offset_is_added_before_rounding() -> None:
    weights = _Weights(torch.bfloat16)
    norm = RmsNorm(weights, OPS, "n.weight", 64, 1e-6, offset=1.0)
    assert norm.weight_D.equal((weights.given["n.weight"].double() + 1).bfloat16())


def test_activation_names() -> None:
    assert find_activation("gelu_new") is find_activation("gelu_pytorch_tanh") is Activation.GELU_TANH
    assert find_activation("silu") is Activation.SILU
    assert find_activation("gelu") is Activation.GELU
    with pytest.raises(ModelError, match="'mish' is not supported"):
        find_activation("mish")
