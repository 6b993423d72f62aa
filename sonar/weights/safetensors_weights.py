"""A folder of safetensors, in one file or sharded, as a `WeightSource`. Called through `sonar.weights.open_weights`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from sonar.config import ModelConfig
from sonar.errors import ModelError
from sonar.ops.table import Matrix, PlainMatrix
from sonar.weights.fused_experts import FusedExperts
from sonar.weights.safetensors_file import SafetensorsFile

_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PACKED_DTYPES = {**_DTYPES, "U8": torch.uint8}
_CONV1D = re.compile(r"transformer\.h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
MOE_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "mixtral": (
        (".block_sparse_moe.", ".mlp."),
        (".w1.weight", ".gate_proj.weight"),
        (".w2.weight", ".down_proj.weight"),
        (".w3.weight", ".up_proj.weight"),
    ),
    "gpt_oss": ((".mlp.router.", ".mlp.gate."),),
}
"""What stands for the names of `sonar.layers.moe` in an architecture's checkpoints."""
_TEXT_PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))
"""How multimodal checkpoints mark their text model -> what stands there otherwise."""


class SafetensorsWeights:
    """See `sonar.weights` for what it promises. Nothing is read before it is asked for but the files' headers.

    Args:
        folder: with model.safetensors, or with the index and its shards.
        dtype: compute dtype of `tensor`'s results. device: where they go; matrices stay on the CPU, mapped.

    Raises:
        ModelError: no such files, a shard is missing, or one is cut short or damaged; named.
    """

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._is_gpt2 = config.architecture == "gpt2"
        self._moe_names = MOE_NAMES.get(config.architecture, ())
        files = _open_files(folder)
        is_multimodal = any(name.startswith(_TEXT_PREFIXES[0][0]) or ".language_model." in name for name in files)
        self._stored: dict[str, tuple[SafetensorsFile, str]] = {}
        for name, file in files.items():
            if (canonical := self._canonical_name(name, is_multimodal)) is not None:
                self._stored[canonical] = (file, name)
        self._read: set[str] = set()
        self._fused: FusedExperts | None = None
        if config.architecture == "gpt_oss" and config.moe is not None:
            self._fused = FusedExperts(self._load, self._stored.__contains__, config.moe.num_experts)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._stored

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See `WeightSource.tensor`."""
        fused = self._fused
        stored = fused.bias(name, shape) if fused is not None and fused.owns(name) else self._load(name, shape)
        return stored.to(self._device, dtype or self._dtype, copy=True)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.matrix`."""
        if self._is_gpt2 and _CONV1D.fullmatch(name):
            return PlainMatrix(self._load(name, (shape[1], shape[0])).t().contiguous())
        if self._fused is not None and self._fused.owns(name):
            return self._fused.matrix(name, shape)
        return PlainMatrix(self._load(name, shape))

    def unread(self) -> list[str]:
        """Tensors of the text model that nothing asked for."""
        return [name for name in self._stored if name not in self._read]

    def sizes(self) -> dict[str, int]:
        """See `WeightSource.sizes`."""
        entries = {name: file.tensors[stored] for name, (file, stored) in self._stored.items()}
        return {name: entry.end - entry.start for name, entry in entries.items()}

    def _canonical_name(self, name: str, is_multimodal: bool) -> str | None:
        """The name within a text-only model; None for what belongs to the vision part."""
        if is_multimodal:
            for prefix, replacement in _TEXT_PREFIXES:
                if name.startswith(prefix):
                    return replacement + name.removeprefix(prefix)
            return name if name.startswith("lm_head.") else None
        if self._is_gpt2 and not name.startswith(("transformer.", "lm_head.")):
            return f"transformer.{name}"
        for theirs, ours in self._moe_names:
            name = name.replace(theirs, ours)
        return name

    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as stored: a view of the mapped file."""
        if name not in self._stored:
            text = (
                f"{self._folder}: tensor {name!r} is missing; the checkpoint is incomplete or of another architecture"
            )
            raise ModelError(text, param="model")
        file, stored_name = self._stored[name]
        entry = file.tensors[stored_name]
        label = f"{file.path}: tensor {stored_name!r}"
        dtypes = _DTYPES if self._fused is None else _PACKED_DTYPES
        if entry.dtype not in dtypes:
            known = ", ".join(_DTYPES)
            raise ModelError(f"{label} has type {entry.dtype}; supported are {known}, or a GGUF file", param="model")
        if entry.shape != shape:
            raise ModelError(f"{label} has shape {entry.shape}; config.json needs {shape}", param="model")
        dtype = dtypes[entry.dtype]
        data = file.data(stored_name)
        if entry.start % dtype.itemsize:  # allowed by the format, by few of its writers done; kernels want alignment
            data = data.copy()
        self._read.add(name)
        return torch.from_numpy(data).view(dtype).reshape(shape)


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the file that holds it."""
    if (folder / _INDEX).is_file():
        return _open_shards(folder, _read_index(folder / _INDEX))
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {', '.join(others[:3])}, which are not read (they may run code)" if others else "none"
        raise ModelError(f"{folder} needs .safetensors files and has {found}; convert the model first", param="model")
    return {name: file for file in map(SafetensorsFile, paths) for name in file.tensors}


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        is_sound = all(isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise ModelError(f"{path} is damaged: it holds no map of tensors to shards; fetch it again", param="model")
    return dict(weight_map)


def _open_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, SafetensorsFile]:
    shards: dict[str, SafetensorsFile] = {}
    out = {}
    for name, shard in weight_map.items():
        if shard not in shards:
            if not (folder / shard).is_file():
                text = f"{folder / shard} is missing: {_INDEX} places tensor {name!r} there; fetch it again"
                raise ModelError(text, param="model")
            shards[shard] = SafetensorsFile(folder / shard)
        if name not in shards[shard].tensors:
            text = f"{folder / shard} lacks tensor {name!r}, which {_INDEX} places there; fetch both again"
            raise ModelError(text, param="model")
        out[name] = shards[shard]
    return out
