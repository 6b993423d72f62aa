"""GGUF metadata -> `ModelConfig`.

Keys: the GGUF specification and the defaults of the programs that write such files. What a file leaves out because its
readers know it (gemma3's pattern of sliding layers, activations) is supplied here. `extra` is as described in
`sonar.model_config_hf`. Called by `sonar.model_config`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from gguf.constants import LlamaFileType

from sonar.config import LayerKind, ModelConfig, RopeConfig
from sonar.config_fields import MAX_LAYERS, Fields
from sonar.errors import ConfigError, ModelError
from sonar.gguf_file import SERVED_TYPES, GGUFArray, GGUFFile
from sonar.rope_fields import yarn_reach

_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "gpt2": "gpt2",
}
"""GGUF's architecture -> ours. Mistral models are written as llama."""

_ACTIVATIONS = {"gemma3_text": "gelu_pytorch_tanh", "gpt2": "gelu_new"}
_DENSE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GEMMA3_PATTERN = 6  # every sixth layer is full
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end a turn or text by their name: files state one end id only, where the models' own
`generation_config.json` lists several."""
_CONTROL = 3


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """The configuration that the file's metadata states. Raises ModelError as `load_model_config`."""
    where = str(file.path)
    general = Fields(file.metadata, where)
    name = general.get_str("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"{where}: architecture {name!r} is not supported; supported in GGUF files are {', '.join(_ARCHITECTURES)}",
            param="model",
        )
    if general.get_int("split.count", 1, low=0) > 1:
        raise ModelError(f"{where} is one of several parts; merge them into one file first", param="model")
    _refuse_unserved_types(file)
    try:
        return _read(file, general, Fields(file.metadata, where, f"{name}."), _ARCHITECTURES[name])
    except ConfigError as error:
        raise ModelError(f"{where}: {error.message}", param="model") from error


def _refuse_unserved_types(file: GGUFFile) -> None:
    for tensor in file.tensors.values():
        if tensor.type_name not in SERVED_TYPES:
            raise ModelError(
                f"{file.path}: tensor {tensor.name!r} has the quantization {tensor.type_name}, which is not supported; "
                f"supported are {', '.join(SERVED_TYPES)}",
                param="model",
            )


def _read(file: GGUFFile, general: Fields, fields: Fields, architecture: str) -> ModelConfig:
    if fields.get_int("expert_count", 0, low=0):
        raise ModelError(f"{fields.where}: mixture-of-experts models are not supported in GGUF files", param="model")
    num_heads, hidden_size = fields.get_int("attention.head_count"), fields.get_int("embedding_length")
    num_layers, max_position = fields.get_int("block_count", high=MAX_LAYERS), fields.get_int("context_length")
    head_dim = fields.get_int("attention.key_length", max(1, hidden_size // num_heads))
    kinds, window = _layer_kinds(file, fields, architecture, num_layers)
    rope = _ropes(fields, architecture, kinds, head_dim, max_position)
    for scaled in rope.values():
        if scaled.scaling == "yarn":
            max_position = max(max_position, yarn_reach(scaled))
    dtype, quantization = _formats(file, general)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=fields.get_int("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.get_int("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=_shortest(_norm_eps(fields, architecture)),
        activation=_ACTIVATIONS.get(architecture, "silu"),
        layer_kinds=kinds,
        rope=rope,
        sliding_window=window,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=any(name in file.tensors for name in ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
        bos_token_id=_token_id(general, "bos"),
        eos_token_ids=_end_ids(file, general),
        dtype=dtype,
        quantization=quantization,
        extra=_extra(file, fields, architecture, num_layers, hidden_size // num_heads, head_dim),
    )


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: files pad it, so that it may exceed the number of tokens."""
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing: no language model", param="model")
    return tensor.shape[0]


def _norm_eps(fields: Fields, architecture: str) -> float:
    kind = "layer_norm_epsilon" if architecture == "gpt2" else "layer_norm_rms_epsilon"
    return fields.get_float(f"attention.{kind}")


def _layer_kinds(
    file: GGUFFile, fields: Fields, architecture: str, num_layers: int
) -> tuple[tuple[LayerKind, ...], int]:
    """Layer kinds and window. gemma3: as the file lists them, else every sixth is full; others slide all or none."""
    window = fields.get_int("attention.sliding_window", 0, low=0)
    if window == 0 or architecture in ("qwen2", "qwen3"):  # qwen files carry a window that is off
        return (LayerKind.FULL,) * num_layers, 0
    if architecture != "gemma3_text":
        return (LayerKind.SLIDING,) * num_layers, window
    written = fields.raw("attention.sliding_window_pattern")
    if isinstance(written, GGUFArray) and written.count == num_layers:
        slides = file.numbers(f"{fields.prefix}attention.sliding_window_pattern")
        return tuple(LayerKind.SLIDING if value else LayerKind.FULL for value in slides), window
    pattern = written if isinstance(written, int) and written > 0 else _GEMMA3_PATTERN
    return tuple(LayerKind.SLIDING if (i + 1) % pattern else LayerKind.FULL for i in range(num_layers)), window


def _ropes(
    fields: Fields, architecture: str, kinds: Iterable[LayerKind], head_dim: int, max_position: int
) -> dict[LayerKind, RopeConfig]:
    if architecture == "gpt2":
        return {}
    dim = fields.get_int("rope.dimension_count", head_dim)
    theta = _shortest(fields.get_float("rope.freq_base", 10_000.0))
    ropes: dict[LayerKind, RopeConfig] = {}
    for kind in dict.fromkeys(kinds):
        if architecture == "gemma3_text" and kind is LayerKind.SLIDING:
            local = _shortest(fields.get_float("rope.freq_base_swa", _GEMMA3_LOCAL_THETA))
            ropes[kind] = RopeConfig(theta=local, dim=dim)
        else:
            ropes[kind] = _scaled_rope(fields, theta, dim, max_position)
    return ropes


def _scaled_rope(fields: Fields, theta: float, dim: int, max_position: int) -> RopeConfig:
    """Scaling as metadata states it. Llama 3's is none here: files state it by the tensor `rope_freqs.weight`."""
    scaling = fields.get_str("rope.scaling.type", "none")
    factor = _shortest(fields.get_float("rope.scaling.factor", fields.get_float("rope.scale_linear", 1.0)))
    match scaling:
        case "none" if factor == 1.0:
            return RopeConfig(theta, dim)
        case "none" | "linear":
            return RopeConfig(theta, dim, "linear", {"factor": factor})
        case "yarn":
            context = fields.get_int("rope.scaling.original_context_length", max_position)
            parameters = {"factor": factor, "original_max_position_embeddings": float(context)}
            for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                if fields.raw(f"rope.scaling.{theirs}") is not None:
                    parameters[ours] = fields.get_float(f"rope.scaling.{theirs}")
            return RopeConfig(theta, dim, "yarn", parameters)
        case _:
            known = "none, linear, yarn"
            raise ModelError(
                f"{fields.where}: rope scaling {scaling!r} is not supported; supported in GGUF files are {known}",
                param="model",
            )


def _formats(file: GGUFFile, general: Fields) -> tuple[str, str | None]:
    """(dtype of dense weights, quantization). A quantized file keeps only norms and biases dense, in float32."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.size_bytes
    main = max(sizes, key=lambda name: sizes[name], default="F32")
    if set(sizes) <= set(_DENSE_DTYPES):
        return _DENSE_DTYPES[main], None
    try:
        return "float32", LlamaFileType(general.raw("general.file_type")).name.removeprefix("MOSTLY_")
    except ValueError:
        return "float32", main


def _token_id(general: Fields, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return None if general.raw(key) is None else general.get_int(key, low=0)


def _end_ids(file: GGUFFile, general: Fields) -> tuple[int, ...]:
    """The stated end ids first, then control tokens that end a turn or text by their name."""
    ids = [_token_id(general, name) for name in ("eos", "eot", "eom")]
    if isinstance(general.raw("tokenizer.ggml.token_type"), GGUFArray):
        unknown = _token_id(general, "unknown")
        types = np.asarray(file.numbers("tokenizer.ggml.token_type"))
        tokens = file.strings("tokenizer.ggml.tokens")
        control = (int(index) for index in np.flatnonzero(types == _CONTROL) if index < len(tokens))
        # SmolLM2 names its unknown token <|endoftext|>; its own configuration does not end there.
        ids += [index for index in control if tokens[index] in _END_TOKENS and index != unknown]
    return tuple(dict.fromkeys(index for index in ids if index is not None))


def _extra(
    file: GGUFFile, fields: Fields, architecture: str, num_layers: int, hidden_per_head: int, head_dim: int
) -> dict[str, float]:
    if architecture == "gemma3_text":
        # Not in the file. Of the published sizes only the 27B scales by hidden_size / num_heads.
        scalar = hidden_per_head if num_layers == _GEMMA3_27B_LAYERS else head_dim
        extra = {"query_pre_attn_scalar": float(scalar)}
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if fields.raw(key) is not None:
                extra[key] = fields.get_float(key)
        return extra
    if architecture == "llama":
        flags = {"o_proj_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}
        return {name: 1.0 for name, tensor in flags.items() if tensor in file.tensors}
    return {}


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32, in which GGUF stores it: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))
