"""Tiny random checkpoints of every served family, made through `transformers`: for tests of models, engine and API.

`write_tiny_folder` leaves what a real Hugging Face folder has: config, generation config, safetensors, tokenizer with a
chat template. 512 tokens, byte-level: any text can be served. Weights are random but not small: norms, biases and
attention all bear on the logits, so that a wrong one shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
BOS_ID, EOS_ID, PAD_ID = 0, 2, 3

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_IDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
_SHAPE: dict[str, Any] = {
    **_IDS,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Any] = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_GEMMA_KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE),
    "llama_bias": lambda: transformers.LlamaConfig(
        **_SHAPE, rope_parameters=_LINEAR_ROPE, attention_bias=True, mlp_bias=True
    ),
    "mistral": lambda: transformers.MistralConfig(**_SHAPE, head_dim=16, sliding_window=19),
    "qwen2": lambda: transformers.Qwen2Config(
        **{**_SHAPE, "tie_word_embeddings": True},
        rope_parameters=_YARN_ROPE,
        use_sliding_window=True,
        sliding_window=23,
        max_window_layers=2,
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, head_dim=24),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**_SHAPE, "tie_word_embeddings": True},
        head_dim=32,
        query_pre_attn_scalar=20,
        sliding_window=17,
        layer_types=_GEMMA_KINDS,
        final_logit_softcapping=25.0,
    ),
    "phi3": lambda: transformers.Phi3Config(**_SHAPE, rope_parameters=_PARTIAL_ROPE, sliding_window=29),
    "gpt2": lambda: transformers.GPT2Config(
        **_IDS, n_embd=64, n_layer=4, n_head=4, n_positions=512, scale_attn_by_inverse_layer_idx=True
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SHAPE,
        head_dim=24,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_SHAPE,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
        decoder_sparse_step=2,
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **_LATENT,
        q_lora_rank=None,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=2,
        n_group=3,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
        moe_intermediate_size=40,
        first_k_dense_replace=1,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=40,
        first_k_dense_replace=1,
        rope_parameters={**_YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **{**_SHAPE, "intermediate_size": 128},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=21,
        rope_parameters={**_YARN_ROPE, "truncate": False},
    ),
}
FAMILIES = tuple(_CONFIGS)


def make_tiny_model(family: str) -> PreTrainedModel:
    """A random float32 causal language model of a family of `FAMILIES`, the same at every call, in eval mode."""
    torch.manual_seed(FAMILIES.index(family))
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
        _CONFIGS[family](), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # transformers starts norms at 1 or 0, biases at 0 and matrices at 0.02: all too tame to find an error.
            noise = torch.randn_like(parameter)
            parameter.add_(noise, alpha=0.3) if parameter.dim() == 1 else parameter.copy_(noise * 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.tie_weights()
    return model.float().eval()


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, without merges: special tokens first, then the 256 bytes; the ids after them are never produced."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
        unk_token=SPECIAL_TOKENS[BOS_ID],
        chat_template=_CHAT_TEMPLATE,
    )


def write_tiny_folder(family: str, folder: Path) -> Path:
    """Writes the family's model and tokenizer as a Hugging Face folder; returns the folder."""
    make_tiny_model(family).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder
