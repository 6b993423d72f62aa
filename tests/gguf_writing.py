"""Small GGUF files for tests: of chosen entries and tensors, or of a tiny model, as converters write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

ARCHITECTURES = {
    "llama": "llama",
    "llama_bias": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
}
"""Family of `tests.tiny` -> GGUF architecture."""
GGUF_FAMILIES = tuple(ARCHITECTURES)

_CONV1D_ENDS = ("c_attn.weight", "attn.c_proj.weight", "c_fc.weight", "mlp.c_proj.weight")


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[npt.NDArray[Any], str]],
) -> Path:
    """A file with these entries (bool, int, float, str, lists of them) and tensors (data, GGML type); raw bytes as
    uint8 for quantized types. Returns the path."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (data, type_name) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf_model(family: str, model: PreTrainedModel, path: Path) -> Path:
    """A tiny model of `tests.tiny` in float32: Q and K of arch llama permuted, gemma's norms plus one, gpt2's matrices
    the other way round, llama3's rope scaling as a tensor. Returns the path."""
    architecture, config = ARCHITECTURES[family], model.config
    names = gguf.get_tensor_name_map(_arch_id(architecture), config.num_hidden_layers)
    tensors: dict[str, tuple[npt.NDArray[Any], str]] = {}
    for hf_name, value in model.state_dict().items():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ".q_proj." in hf_name:
            value = _permute(value, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in hf_name:
            value = _permute(value, config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        if hf_name.endswith(_CONV1D_ENDS):
            value = value.T
        tensors[name] = (value.contiguous().numpy(), "F32")
    if family == "llama":
        rotary = model.model.rotary_emb
        plain = 1.0 / 10_000.0 ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        tensors["rope_freqs.weight"] = ((plain / rotary.inv_freq).numpy(), "F32")
    return write_gguf(path, architecture, _metadata(family, architecture, config), tensors)


def quantized(shape: tuple[int, int], type_name: str, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Rows of a quantized matrix (N, K) with arbitrary contents but finite scales: every byte is below 0x3C."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    random = np.random.default_rng(seed)
    return random.integers(0, 0x3C, (shape[0], shape[1] // block * block_bytes), dtype=np.uint8)


def _arch_id(architecture: str) -> gguf.MODEL_ARCH:
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _permute(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As llama's converter writes Q and K: the two halves of a head interleaved."""
    split = value.reshape(num_heads, 2, value.shape[0] // num_heads // 2, *value.shape[1:])
    return split.swapaxes(1, 2).reshape(value.shape)


def _metadata(family: str, architecture: str, config: Any) -> dict[str, Any]:
    eps = "layer_norm_epsilon" if architecture == "gpt2" else "layer_norm_rms_epsilon"
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads),
        f"attention.{eps}": float(getattr(config, "rms_norm_eps", 1e-5)),
    }
    if getattr(config, "head_dim", None):
        values["attention.key_length"] = config.head_dim
    match family:
        case "llama_bias":
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
        case "qwen2":
            values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
            values |= {"rope.scaling.original_context_length": 128}
        case "gemma3":
            values |= {"attention.sliding_window": 17, "rope.freq_base": 1e6, "final_logit_softcapping": 25.0}
            values |= {"attention.sliding_window_pattern": [True, True, True, False]}
        case "phi3":
            values |= {"attention.sliding_window": 29, "rope.dimension_count": 8}
    return {f"{architecture}.{key}": value for key, value in values.items()}
