"""Hugging Face's tensor names -> GGUF's, for the architectures that are read. Torch-free; called by `GGUFWeights`."""

from __future__ import annotations

import re

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_SANDWICH_LAYER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Where a family norms its parts' outputs too, `post_attention_layernorm` is another tensor."""

_HF_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)\.(weight|bias)")
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


class GGUFNames:
    """Both directions for one architecture (a key of `sonar.models.registry`). Unknown names stay as they are."""

    def __init__(self, architecture: str) -> None:
        is_gpt2 = architecture == "gpt2"
        layer = {**_LAYER, **(_SANDWICH_LAYER if architecture == "gemma3_text" else {})}
        own = ("ln_", "attn.", "mlp.c_") if is_gpt2 else ("input_", "self_attn.", "post_", "pre_", "mlp.")
        self._layer = {hf: gguf for hf, gguf in layer.items() if hf.startswith(own)}
        self._top = {
            hf: gguf for hf, gguf in _TOP.items() if hf.startswith("transformer.") == is_gpt2 or hf == "lm_head"
        }
        if architecture == "phi3":
            del self._layer["mlp.up_proj"]
        elif not is_gpt2:
            del self._layer["mlp.gate_up_proj"]
        self._hf_layer = {gguf: hf for hf, gguf in self._layer.items()}
        self._hf_top = {gguf: hf for hf, gguf in self._top.items()}
        self._hf_prefix = "transformer.h" if is_gpt2 else "model.layers"

    def to_gguf(self, name: str) -> str:
        """E.g. `model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
        if found := _HF_LAYER.fullmatch(name):
            index, part, kind = found.groups()
            return f"blk.{index}.{self._layer[part]}.{kind}" if part in self._layer else name
        part, _, kind = name.rpartition(".")
        return f"{self._top[part]}.{kind}" if part in self._top else name

    def to_hf(self, name: str) -> str:
        """The reverse of `to_gguf`."""
        if found := _GGUF_LAYER.fullmatch(name):
            index, part, kind = found.groups()
            return f"{self._hf_prefix}.{index}.{self._hf_layer.get(part, part)}.{kind}"
        part, _, kind = name.rpartition(".")
        return f"{self._hf_top[part]}.{kind}" if part in self._hf_top else name
