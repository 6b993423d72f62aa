"""A weight source over a transformers state dict in memory, for tests of models without files."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sonar.errors import ModelError
from sonar.ops.table import Matrix, PlainMatrix

_CONV1D_ENDS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def _by_expert(name: str, stacked: Tensor, model_type: str) -> dict[str, Tensor]:
    """A tensor of all experts, as transformers computes with it, under the names of one each."""
    prefix, _, part = name.rpartition(".")
    kind = "bias" if part.endswith("_bias") else "weight"
    out: dict[str, Tensor] = {}
    for expert, rows in enumerate(stacked):
        if model_type == "gpt_oss" and kind == "weight":
            rows = rows.T
        named = {"down_proj": rows}
        if part.startswith("gate_up"):
            pair = (rows[::2], rows[1::2]) if model_type == "gpt_oss" else rows.chunk(2)
            named = dict(zip(("gate_proj", "up_proj"), pair, strict=True))
        out |= {f"{prefix}.{expert}.{end}.{kind}": rows.contiguous() for end, rows in named.items()}
    return out


class DictWeights:
    """Hands out a model's tensors as `sonar.models.base.WeightSource` promises."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, device: str = "cpu") -> None:
        self.tensors: dict[str, Tensor] = {
            name: value.T.contiguous() if name.endswith(_CONV1D_ENDS) else value
            for name, value in model.state_dict().items()
        }
        for name in [name for name in self.tensors if ".mlp.experts." in name]:
            self.tensors |= _by_expert(name, self.tensors.pop(name), model.config.model_type)
        for name in [name for name in self.tensors if ".mlp.router." in name]:
            self.tensors[name.replace(".router.", ".gate.")] = self.tensors.pop(name)
        self._dtype = dtype
        self._device = device
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._find(name, shape).to(self._device, dtype or self._dtype)

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
