"""Fields of mixtures of experts and of latent attention in `config.json` -> `MoeConfig`, `MlaConfig`.

Names and defaults are those of each family's configuration class in transformers; version 5 writes `num_local_experts`
where older files say `num_experts` or `n_routed_experts`. Called by `sonar.model_config_hf`. Torch-free.
"""

from __future__ import annotations

from sonar.config import MlaConfig, MoeConfig
from sonar.config_fields import MAX_LAYERS, Fields
from sonar.errors import ModelError


def read_mixtral_experts(fields: Fields) -> MoeConfig:
    """mixtral: every layer is sparse."""
    return MoeConfig(
        num_experts=_num_experts(fields, 8),
        top_k=fields.get_int("num_experts_per_tok", 2),
        intermediate_size=fields.get_int("intermediate_size"),
        sparse_layers=_all_layers(fields),
        renormalize=True,
    )


def read_qwen_experts(fields: Fields, *, has_shared: bool) -> MoeConfig:
    """qwen2_moe (with an expert that all tokens share) and qwen3_moe."""
    step = fields.get_int("decoder_sparse_step", 1)
    dense = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.wrong("mlp_only_layers", "a list of layers")
    return MoeConfig(
        num_experts=_num_experts(fields, 60 if has_shared else 128),
        top_k=fields.get_int("num_experts_per_tok", 4 if has_shared else 8),
        intermediate_size=fields.get_int("moe_intermediate_size", 1408 if has_shared else 768),
        sparse_layers=frozenset(i for i in _all_layers(fields) if i not in dense and (i + 1) % step == 0),
        shared_intermediate_size=fields.get_int("shared_expert_intermediate_size", 5632) if has_shared else 0,
        renormalize=fields.get_bool("norm_topk_prob", False),
    )


def read_gpt_oss_experts(fields: Fields) -> MoeConfig:
    """gpt_oss: every layer is sparse; experts are weighed among the chosen."""
    return MoeConfig(
        num_experts=_num_experts(fields, 128),
        top_k=fields.get_int("num_experts_per_tok", fields.get_int("experts_per_token", 4)),
        intermediate_size=fields.get_int("intermediate_size"),
        sparse_layers=_all_layers(fields),
        scoring="softmax_of_chosen",
    )


def read_deepseek_experts(fields: Fields, *, is_v3: bool) -> MoeConfig:
    """deepseek_v2 and v3: the first layers are dense; experts lie in groups.

    v2 weighs by the softmax over all experts, and a group by its best expert; v3 by sigmoids with a bias for the
    choice, and a group by its best two.
    """
    first_dense = fields.get_int("first_k_dense_replace", 3 if is_v3 else 0, low=0)
    size = fields.get_int("moe_intermediate_size", 2048 if is_v3 else 1407)
    step = fields.get_int("moe_layer_freq", 1)
    method = fields.get_str("topk_method", "noaux_tc" if is_v3 else "greedy")
    known = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    if method not in known or step != 1:
        raise ModelError(
            f"{fields.where}: topk_method={method!r} with moe_layer_freq={step} is not supported; "
            f"supported are {', '.join(known)} with 1",
            param="model",
        )
    is_grouped = method != "greedy"
    return MoeConfig(
        num_experts=_num_experts(fields, 256 if is_v3 else 64),
        top_k=fields.get_int("num_experts_per_tok", 8 if is_v3 else 6),
        intermediate_size=size,
        sparse_layers=frozenset(i for i in _all_layers(fields) if i >= first_dense),
        shared_intermediate_size=size * fields.get_int("n_shared_experts", 1 if is_v3 else 2, low=0),
        scoring="sigmoid" if is_v3 else "softmax",
        renormalize=fields.get_bool("norm_topk_prob", is_v3) and is_v3,  # v2's code never does, whatever its file says
        scale=fields.get_float("routed_scaling_factor", 2.5 if is_v3 else 1.0),
        num_groups=fields.get_int("n_group", 8 if is_v3 else 1) if is_grouped else 1,
        top_groups=fields.get_int("topk_group", 4 if is_v3 else 1) if is_grouped else 1,
        group_best=2 if is_v3 else 1,
    )


def read_latent_attention(fields: Fields, *, is_v3: bool) -> MlaConfig:
    """deepseek_v2 and v3. A `q_lora_rank` of null, where it is written, means none."""
    has_q_lora = "q_lora_rank" not in fields.values or fields.raw("q_lora_rank") is not None
    return MlaConfig(
        kv_lora_rank=fields.get_int("kv_lora_rank", 512),
        qk_nope_head_dim=fields.get_int("qk_nope_head_dim", 128),
        qk_rope_head_dim=fields.get_int("qk_rope_head_dim", 64),
        v_head_dim=fields.get_int("v_head_dim", 128),
        q_lora_rank=fields.get_int("q_lora_rank", 1536) if has_q_lora else 0,
        is_interleaved=fields.get_bool("rope_interleave", True) if is_v3 else True,
    )


def _num_experts(fields: Fields, default: int) -> int:
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if fields.raw(name) is not None:
            return fields.get_int(name, high=65_536)
    return default


def _all_layers(fields: Fields) -> frozenset[int]:
    return frozenset(range(fields.get_int("num_hidden_layers", high=MAX_LAYERS)))
