"""The compiled CPU kernels (csrc/cpu): addresses and numbers in. Callers check shapes, dtypes and strides.

Addresses are `Tensor.data_ptr()`, 0 for an optional tensor that is absent. Strides count elements, those of a cache
bytes. Floats are float32. A cache is given as: address, type, byte strides of block, K or V, head and slot, block size.
Types are GGML's numbers: F32 0, F16 1, BF16 30, Q4_1 3, ... Raises TypeError or ValueError on wrong constants only.
"""

from typing import NewType

LinearPlan = NewType("LinearPlan", object)
LayerPlan = NewType("LayerPlan", object)

def levels() -> tuple[str, ...]: ...
def level() -> str: ...
def set_level(name: str, /) -> str: ...
def set_num_threads(n: int, /) -> None: ...
def num_threads() -> int: ...
def packed_bytes(type: int, n: int, k: int, /) -> int: ...
def pack(type: int, rows: int, row_bytes: int, n: int, k: int, out: int, /) -> None: ...
def linear_plan(k: int, /, *type_int8_n_packed_bias: int) -> LinearPlan: ...
def linear(
    plan: LinearPlan,
    x: int,
    x_stride: int,
    num_rows: int,
    y: int,
    y_stride: int,
    norm: int,
    eps: float,
    activation: int,
    add: int,
    /,
) -> None: ...
def embedding(type: int, rows: int, row_bytes: int, n: int, k: int, ids: int, num_ids: int, out: int, /) -> None: ...
def rms_norm(x: int, x_stride: int, weight: int, out: int, num_rows: int, d: int, eps: float, /) -> None: ...
def add_rms_norm(
    x: int,
    x_stride: int,
    residual: int,
    residual_stride: int,
    weight: int,
    out: int,
    num_rows: int,
    d: int,
    eps: float,
    /,
) -> None: ...
def layer_norm(
    x: int, x_stride: int, weight: int, bias: int, out: int, num_rows: int, d: int, eps: float, /
) -> None: ...
def activation(kind: int, x: int, x_stride: int, up: int, out: int, num_rows: int, n: int, /) -> None: ...

# heads: cos_sin, rotary_dim, q_norm, k_norm, norm_eps, num_heads, num_kv_heads, head_dim.
# tokens: num_tokens, positions, cache x 7, slot_mapping.
# requests: block_table, its stride, query_start, seq_lens, num_requests. scores: scale, window, softcap.
def rope_kv_write(qkv: int, stride: int, /, *heads_tokens_q_out: float) -> None: ...
def attention(q: int, /, *cache_head_counts_requests_scores_sinks_out: float) -> None: ...
def rope_attention(qkv: int, stride: int, /, *heads_tokens_requests_scores_out: float) -> None: ...
def layer_plan(
    qkv: LinearPlan,
    output: LinearPlan,
    gate_up: LinearPlan,
    down: LinearPlan,
    attention_norm: int,
    mlp_norm: int,
    norm_eps: float,
    activation: int,
    /,
    *heads_scores: float,
) -> LayerPlan: ...
def layer(plan: LayerPlan, residual: int, /, *tokens_requests: int) -> None: ...
def sample(
    logits: int,
    stride: int,
    num_rows: int,
    vocab: int,
    all_greedy: int,
    temperature: int,
    top_k: int,
    top_p: int,
    min_p: int,
    typical_p: int,
    keys: int,
    out: int,
    /,
) -> None: ...
def float_ceiling(rounds: int, /) -> float: ...
def dot_ceiling(rounds: int, /) -> float: ...
def read_ceiling(data: int, num_bytes: int, /) -> None: ...
