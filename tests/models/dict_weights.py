"""A weight source over a transformers state dict in memory, for tests of models without files."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sonar.errors import ModelError
from sonar.ops.table import Matrix, PlainMatrix

_CONV1D_ENDS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


class DictWeights:
    """Hands out a model's tensors as `sonar.models.base.WeightSource` promises."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, device: str = "cpu") -> None:
        self.tensors: dict[str, Tensor] = {
            name: value.T.contiguous() if name.endswith(_CONV1D_ENDS) else value
            for name, value in model.state_dict().items()
        }
        self._dtype = dtype
        self._device = device
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._find(name, shape).to(self._device, self._dtype)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        return PlainMatrix(self._find(name, shape))

    def unread(self) -> list[str]:
        return sorted(set(self.tensors) - self._read)

    def _find(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.tensors:
            raise ModelError(f"tensor {name!r} is missing", param="model")
        if tuple(self.tensors[name].shape) != shape:
            raise ModelError(f"tensor {name!r} is {tuple(self.tensors[name].shape)}, not {shape}", param="model")
        self._read.add(name)
        return self.tensors[name]
