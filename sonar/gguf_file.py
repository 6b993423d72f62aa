"""Header, metadata and tensor table of a GGUF file (versions 2 and 3, little-endian).

Format: the GGUF specification (ggml project). Every length in the file is checked against the bytes that are left
before anything is read or allocated, so that a cut or damaged file ends in a `ModelError` that names the field. Strings
of the vocabulary are decoded only when asked for: opening a file with 49,152 tokens takes 10 ms here, where
`gguf.GGUFReader`, which makes several arrays a string, takes 1.9 s.

Knows nothing of architectures, tokenizers or what a tensor is for. Called by `sonar.model_config`, `sonar.weights`
and `sonar.tokenizer`. Torch-free.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from sonar.errors import ModelError
from sonar.mapped_file import map_file

SERVED_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
"""GGML types that can be computed with, in the order messages list them."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NESTING = 4
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1  # a key of one character and a one-byte value; or more, for a tensor

Scalar = int | float | bool | str
_TypeTest = Callable[[int], bool]


@dataclass(frozen=True)
class GGUFArray:
    """An array of the metadata, left in the file. start: offset of its first element; type_id: of the elements."""

    type_id: int
    count: int
    start: int


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table.

    Attributes:
        shape: slowest dimension first, as numpy and torch count: a matrix is (N, K).
        type_name: GGML type, e.g. "Q4_1". row_bytes: bytes of one row of K elements.
        start: offset of its data in the file. size_bytes: of its data.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    row_bytes: int
    start: int
    size_bytes: int


class GGUFFile:
    """An open GGUF file: owner of its mapping.

    Attributes:
        metadata: key -> scalar, or the place of an array (see `strings` and `numbers`).
        tensors: by GGUF name, in the file's order.

    Raises:
        ModelError: no GGUF file, another version, cut short or damaged; the text names the field or tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = map_file(path)
        cursor = _Cursor(path, self.data.data)
        self.metadata: dict[str, Scalar | GGUFArray] = {}
        num_tensors, num_entries = _read_counts(cursor)
        for index in range(num_entries):
            self._read_entry(cursor, index)
        self.tensors: dict[str, GGUFTensor] = {}
        for index in range(num_tensors):
            self._read_tensor(cursor, index)
        self._place_tensors(cursor.position)

    def strings(self, key: str) -> list[str]:
        """An array of strings; bytes that are no UTF-8 become U+FFFD. Raises ModelError if the key holds none."""
        array = self._array(key, lambda type_id: type_id == _STRING, "strings")
        data, position, unpack = self.data.data, array.start, _U64.unpack_from
        out = []
        for _ in range(array.count):
            end = position + 8 + unpack(data, position)[0]
            out.append(str(data[position + 8 : end], "utf-8", "replace"))
            position = end
        return out

    def numbers(self, key: str) -> list[int] | list[float]:
        """An array of integers, floats or booleans. Raises ModelError if the key holds none."""
        array = self._array(key, lambda type_id: type_id in _SCALARS, "numbers")
        dtype = np.dtype(_SCALARS[array.type_id].format)
        values: list[int] | list[float] = np.frombuffer(self.data, dtype, array.count, array.start).tolist()
        return values

    def rows(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, (rows, bytes a row), a view of the mapping; rows flatten all dims but K."""
        flat = self.data[tensor.start : tensor.start + tensor.size_bytes]
        return flat.reshape(-1, tensor.row_bytes) if tensor.row_bytes else flat.reshape(0, 0)

    def _array(self, key: str, fits: _TypeTest, wanted: str) -> GGUFArray:
        value = self.metadata.get(key)
        if not isinstance(value, GGUFArray) or not fits(value.type_id):
            found = "missing" if value is None else "of another type"
            raise ModelError(f"{self.path}: metadata field {key!r} is {found}; an array of {wanted} is needed")
        return value

    def _read_entry(self, cursor: _Cursor, index: int) -> None:
        cursor.field = f"metadata entry {index}"
        key = cursor.string()
        cursor.field = f"metadata field {key!r}"
        if key in self.metadata:
            raise cursor.damaged("appears twice")
        type_id = cursor.u32()
        self.metadata[key] = cursor.array(0) if type_id == _ARRAY else cursor.scalar(type_id)

    def _read_tensor(self, cursor: _Cursor, index: int) -> None:
        cursor.field = f"entry {index} of the tensor table"
        name = cursor.string()
        cursor.field = f"tensor {name!r}"
        if name in self.tensors:
            raise cursor.damaged("appears twice")
        num_dims = cursor.u32()
        if not 1 <= num_dims <= _MAX_DIMS:
            raise cursor.damaged(f"has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        dims = [cursor.u64() for _ in range(num_dims)]
        type_id = cursor.u32()
        try:
            ggml_type = GGMLQuantizationType(type_id)
        except ValueError:
            raise cursor.damaged(f"has the unknown type number {type_id}") from None
        block, block_bytes = GGML_QUANT_SIZES[ggml_type]
        if dims[0] % block:
            raise cursor.damaged(f"has {dims[0]} columns, no multiple of {ggml_type.name}'s block of {block}")
        row_bytes = dims[0] // block * block_bytes
        size_bytes = row_bytes
        for dim in dims[1:]:
            size_bytes *= dim
        shape = tuple(reversed(dims))
        self.tensors[name] = GGUFTensor(name, shape, ggml_type.name, row_bytes, cursor.u64(), size_bytes)

    def _place_tensors(self, header_end: int) -> None:
        """Turn offsets from the data section into offsets from the file, and see that every tensor is whole."""
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self.path} is damaged: general.alignment={alignment!r} is no power of two")
        section = -(-header_end // alignment) * alignment
        for name, entry in self.tensors.items():
            start = section + entry.start
            if start + entry.size_bytes > self.data.size:
                raise ModelError(
                    f"{self.path} is cut short: tensor {name!r} needs bytes {start} to {start + entry.size_bytes}, "
                    f"the file has {self.data.size}; fetch it again"
                )
            self.tensors[name] = GGUFTensor(
                name, entry.shape, entry.type_name, entry.row_bytes, start, entry.size_bytes
            )


class _Cursor:
    """Reads forward through the header; owner of the position. field: what is being read, for error texts."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.position = 0
        self.field = "header"
        self._data = data

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged or no GGUF file: {self.field} {what}; fetch it again")

    def need(self, num_bytes: int) -> None:
        """Raise unless this many bytes are left."""
        if num_bytes > len(self._data) - self.position:
            raise self.damaged(f"needs {num_bytes} bytes, {len(self._data) - self.position} are left")

    def u32(self) -> int:
        return int(self._unpack(_U32))

    def u64(self) -> int:
        return int(self._unpack(_U64))

    def string(self) -> str:
        length = self.u64()
        self.need(length)
        start, self.position = self.position, self.position + length
        try:
            return str(self._data[start : self.position], "utf-8")
        except UnicodeDecodeError:
            raise self.damaged("holds text that is no UTF-8") from None

    def scalar(self, type_id: int) -> Scalar:
        if type_id == _STRING:
            return self.string()
        value = self._unpack(self._scalar_format(type_id))
        assert isinstance(value, (int, float)), value
        return value

    def array(self, depth: int) -> GGUFArray:
        """Step over an array; nothing of it is decoded."""
        type_id, count = self.u32(), self.u64()
        start = self.position
        if type_id == _STRING:
            self._skip_strings(count)
        elif type_id == _ARRAY:
            if depth == _MAX_NESTING:
                raise self.damaged(f"nests arrays deeper than {_MAX_NESTING}")
            self.need(count * 12)
            for _ in range(count):
                self.array(depth + 1)
        else:
            size_bytes = count * self._scalar_format(type_id).size
            self.need(size_bytes)
            self.position += size_bytes
        return GGUFArray(type_id, count, start)

    def _skip_strings(self, count: int) -> None:
        self.need(count * 8)
        data, position, unpack, last = self._data, self.position, _U64.unpack_from, len(self._data) - 8
        for index in range(count):
            if position > last:
                raise self.damaged(f"ends within string {index} of {count}")
            position += 8 + unpack(data, position)[0]
        if position > len(data):
            raise self.damaged(f"ends within string {count - 1} of {count}")
        self.position = position

    def _scalar_format(self, type_id: int) -> struct.Struct:
        if type_id not in _SCALARS:
            raise self.damaged(f"has the unknown value type {type_id}")
        return _SCALARS[type_id]

    def _unpack(self, layout: struct.Struct) -> Scalar:
        self.need(layout.size)
        value: Scalar = layout.unpack_from(self._data, self.position)[0]
        self.position += layout.size
        return value


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; returns (number of tensors, number of metadata entries)."""
    cursor.need(24)
    magic, version = cursor.u32(), cursor.u32()
    if magic != _U32.unpack(b"GGUF")[0]:
        raise cursor.damaged("does not begin with 'GGUF'")
    if version & 0xFFFF == 0:
        raise ModelError(f"{cursor.path} is a big-endian GGUF file; convert it to little-endian")
    if version not in (2, 3):
        raise ModelError(f"{cursor.path} has GGUF version {version}; versions 2 and 3 are known: convert it anew")
    num_tensors, num_entries = cursor.u64(), cursor.u64()
    cursor.need((num_tensors + num_entries) * _MIN_ENTRY_BYTES)
    return num_tensors, num_entries
