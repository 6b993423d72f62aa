"""A GGUF file as a `WeightSource`. Called through `sonar.weights.open_weights`."""

from __future__ import annotations

import gguf
import torch
from torch import Tensor

from sonar.config import ModelConfig
from sonar.errors import ModelError
from sonar.gguf_file import SERVED_TYPES, GGUFFile, GGUFTensor
from sonar.mapped_file import release_pages
from sonar.ops.table import GGUFMatrix, Matrix, PlainMatrix
from sonar.weights.gguf_names import GGUFNames

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """See `sonar.weights` for what it promises; matrices are views of the mapped file, except permuted Q and K.

    Args:
        config: for the architecture and the head counts.
        dtype: compute dtype of `tensor`'s results. device: where they go; matrices stay on the CPU.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._file = file
        self._names = GGUFNames(config.architecture)
        self._dtype = dtype
        self._device = device
        is_permuted = file.metadata.get("general.architecture") == "llama"
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if is_permuted else {}
        self._norm_offset = 1.0 if config.architecture == "gemma3_text" else 0.0
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return self._names.to_gguf(name) in self._file.tensors

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See `WeightSource.tensor`."""
        stored = self._find(name, shape)
        rows = self._file.rows(stored)
        if stored.type_name in _DENSE:
            values = torch.from_numpy(rows).view(_DENSE[stored.type_name])
        else:
            ggml_type = gguf.GGMLQuantizationType[stored.type_name]
            values = torch.from_numpy(gguf.quants.dequantize(rows, ggml_type))
        values = _unpermute(values.reshape(shape), self._permuted_heads(name))
        if self._norm_offset and name.endswith("norm.weight"):
            values = values.float() - self._norm_offset
        return values.to(self._device, dtype or self._dtype, copy=True)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.matrix`."""
        stored = self._find(name, shape)
        raw_NX = _unpermute(torch.from_numpy(self._file.rows(stored)), self._permuted_heads(name))
        if stored.type_name in _DENSE:
            return PlainMatrix(raw_NX.view(_DENSE[stored.type_name]))
        return GGUFMatrix(raw_NX, stored.type_name, shape[1])

    def unread(self) -> list[str]:
        """Tensors that nothing asked for, by Hugging Face's names where they have one."""
        return [self._names.to_hf(name) for name in self._file.tensors if name not in self._read]

    def sizes(self) -> dict[str, int]:
        """See `WeightSource.sizes`."""
        return {self._names.to_hf(name): tensor.size_bytes for name, tensor in self._file.tensors.items()}

    def release_pages(self) -> None:
        """Gives back the memory of what was read; see `sonar.mapped_file.release_pages`. Matrices stay as they are."""
        release_pages(self._file.data)

    def _find(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        """The table's entry, checked."""
        gguf_name = self._names.to_gguf(name)
        stored = self._file.tensors.get(gguf_name)
        label = f"{self._file.path}: tensor {gguf_name!r} ({name})"
        if stored is None:
            raise ModelError(f"{label} is missing; the file is incomplete or of another architecture", param="model")
        if stored.shape != shape:
            raise ModelError(f"{label} has shape {stored.shape}; the model's metadata needs {shape}", param="model")
        if stored.type_name not in SERVED_TYPES:
            known = ", ".join(SERVED_TYPES)
            raise ModelError(f"{label} has type {stored.type_name}; supported are {known}", param="model")
        self._read.add(gguf_name)
        return stored

    def _permuted_heads(self, name: str) -> int:
        """Heads whose rows the file holds permuted; 0 if it is not one of those tensors."""
        part = name.rpartition(".")[0].rpartition(".")[2]
        return self._heads.get(part, 0)


def _unpermute(values: Tensor, num_heads: int) -> Tensor:
    """Rows of Q and K in Hugging Face's order, (half, pair) within a head; arch llama holds them as (pair, half).

    Rows move whole, so this holds for packed rows too: quantization runs along K.
    """
    if num_heads == 0:
        return values
    num_rows, rest = values.shape[0], values.shape[1:]
    split = values.reshape(num_heads, num_rows // num_heads // 2, 2, *rest)
    return split.transpose(1, 2).reshape(num_rows, *rest)
