"""Weights that are no numbers are refused by name, in every format; sound ones are handed on as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonar.errors import ModelError
from sonar.gguf_file import SERVED_TYPES
from sonar.ops.table import GGUFMatrix, PlainMatrix
from sonar.weights.finite_weights import FiniteWeights
from tests.gguf_writing import quantized

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}
SIZES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}
SIZES |= {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


class OneTensor:
    """A source of one tensor, whatever it is asked for."""

    def __init__(self, held):
        self.held = held

    def has(self, name):
        return True

    def tensor(self, name, shape, dtype=None):
        return self.held

    def matrix(self, name, shape):
        return self.held

    def unread(self):
        return ["x"]

    def sizes(self):
        return {"x": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_dense_tensor_with_one_bad_number_is_named(dtype, bad):
    sound = torch.randn(33, 64).to(dtype)
    held = PlainMatrix(sound)
    assert FiniteWeights(OneTensor(held)).matrix("w", (33, 64)) is held
    assert FiniteWeights(OneTensor(sound)).tensor("w", (33, 64)) is sound
    spoilt = sound.clone()
    spoilt[17, 5] = bad
    with pytest.raises(ModelError, match=r"tensor 'layer\.w' holds NaN or infinite"):
        FiniteWeights(OneTensor(PlainMatrix(spoilt))).matrix("layer.w", (33, 64))
    with pytest.raises(ModelError, match="'norm'"):
        FiniteWeights(OneTensor(spoilt)).tensor("norm", (33, 64))


@pytest.mark.parametrize("type_name", sorted(set(SERVED_TYPES) & set(SIZES)))
def test_a_block_with_a_bad_scale_is_named(type_name):
    raw = torch.from_numpy(np.array(quantized((5, 512), type_name))).view(torch.uint8).reshape(5, -1)
    held = GGUFMatrix(raw, type_name, 512)
    assert FiniteWeights(OneTensor(held)).matrix("w", (5, 512)) is held
    for offset in SCALES.get(type_name, (0, 2)):
        spoilt = raw.clone()
        at = SIZES[type_name] + offset  # of the second block of row 3
        spoilt[3, at : at + 2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)
        with pytest.raises(ModelError, match="'w'"):
            FiniteWeights(OneTensor(GGUFMatrix(spoilt, type_name, 512))).matrix("w", (5, 512))


def test_the_rest_is_handed_on():
    weights = FiniteWeights(OneTensor(torch.zeros(())))
    assert weights.has("x") and weights.unread() == ["x"] and weights.sizes() == {"x": 1}
    assert weights.tensor("x", ()).shape == ()
