"""Header of one safetensors file, checked against the file's size; tensors are views of the mapped file.

Format: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data. Knows nothing of
models. Torch-free; called by `SafetensorsWeights`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sonar.errors import ModelError
from sonar.mapped_file import map_file

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: dtype by the format's name, e.g. "BF16"; start, end: offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open file: owner of its mapping. tensors: by name, in the header's order.

    Raises:
        ModelError: no such file, cut short or damaged; the text names the file and, where one is at fault, the tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        header_bytes = int.from_bytes(self._data[:8].tobytes(), "little")
        if header_bytes > min(self._data.size - 8, _MAX_HEADER_BYTES):
            raise self._damaged(f"its header of {header_bytes} bytes does not fit its {self._data.size} bytes")
        try:
            header = json.loads(self._data[8 : 8 + header_bytes].tobytes())
        except ValueError as error:
            raise self._damaged(f"its header is no JSON ({error})") from None
        if not isinstance(header, dict):
            raise self._damaged("its header is no JSON object")
        header.pop("__metadata__", None)
        self.tensors = {name: self._entry(name, entry, 8 + header_bytes) for name, entry in header.items()}

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor, a view."""
        stored = self.tensors[name]
        return self._data[stored.start : stored.end]

    def _entry(self, name: str, entry: Any, base: int) -> StoredTensor:
        try:
            dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
            is_sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end)) and begin <= end
        except (KeyError, TypeError, ValueError):
            is_sound = False
        if not is_sound:
            raise self._damaged(f"the header's entry of tensor {name!r} is {str(entry)[:100]}")
        if dtype in _ITEM_BYTES and math.prod(shape) * _ITEM_BYTES[dtype] != end - begin:
            raise self._damaged(f"tensor {name!r} of shape {shape} and type {dtype} has {end - begin} bytes")
        if base + end > self._data.size:
            raise ModelError(
                f"{self.path} is cut short: tensor {name!r} ends at byte {base + end}, the file has {self._data.size}; "
                "fetch it again",
                param="model",
            )
        return StoredTensor(dtype, shape, base + begin, base + end)

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged or no safetensors file: {what}; fetch it again", param="model")
