"""Hugging Face's tensor names -> GGUF's, for the architectures that are read. Torch-free; called by `GGUFWeights`."""

from __future__ import annotations

import re

_DECODER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_DECODER_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_GEMMA3 = {
    **_DECODER,
    "post_attention_layernorm": "post_attention_norm",  # here it norms attention's output, not the mlp's input
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PHI3 = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT2 = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_GPT2_TOP = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
_LAYERS = {"gemma3_text": _GEMMA3, "phi3": _PHI3, "gpt2": _GPT2}

_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


class GGUFNames:
    """Both directions for one architecture (a key of `sonar.models.registry`). Unknown names stay as they are."""

    def __init__(self, architecture: str) -> None:
        self._layer = _LAYERS.get(architecture, _DECODER)
        self._top = _GPT2_TOP if architecture == "gpt2" else _DECODER_TOP
        self._prefix = "transformer.h" if architecture == "gpt2" else "model.layers"
        self._hf_layer = {gguf: hf for hf, gguf in self._layer.items()}
        self._hf_top = {gguf: hf for hf, gguf in self._top.items()}
        self._pattern = re.compile(re.escape(self._prefix) + r"\.(\d+)\.(.+)\.(weight|bias)")

    def to_gguf(self, name: str) -> str:
        """E.g. `model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
        if found := self._pattern.fullmatch(name):
            index, part, kind = found.groups()
            return f"blk.{index}.{self._layer[part]}.{kind}" if part in self._layer else name
        part, _, kind = name.rpartition(".")
        return f"{self._top[part]}.{kind}" if part in self._top else name

    def to_hf(self, name: str) -> str:
        """The reverse of `to_gguf`; a tensor of a layer that has no such name keeps its own part of it."""
        if found := _GGUF_LAYER.fullmatch(name):
            index, part, kind = found.groups()
            return f"{self._prefix}.{index}.{self._hf_layer.get(part, part)}.{kind}"
        part, _, kind = name.rpartition(".")
        return f"{self._hf_top[part]}.{kind}" if part in self._hf_top else name
