"""The compiled CPU kernels (csrc/cpu): addresses and numbers in. Callers check shapes, dtypes and strides.

Addresses are `Tensor.data_ptr()`, 0 for an optional tensor that is absent. Strides count elements, those of a cache
bytes. Floats are float32. A cache is given as: address, type, byte strides of block, K or V, head and slot, block size.
Types are GGML's numbers: F32 0, F16 1, BF16 30, Q4_1 3, ... Raises TypeError or ValueError on wrong constants only.
"""

from typing import NewType

LinearPlan = NewType("LinearPlan", object)

def levels() -> tuple[str, ...]: ...
def level() -> str: ...
def set_level(name: str, /) -> str: ...
def set_num_threads(n: int, /) -> None: ...
def num_threads() -> int: ...
def packed_bytes(type: int, n: int, k: int, /) -> int: ...
def pack(type: int, rows: int, row_bytes: int, n: int, k: int, out: int, /) -> None: ...
def linear_plan(k: int, /, *type_int8_n_packed_bias: int) -> LinearPlan: ...
def linear(plan: LinearPlan, x: int, x_stride: int, num_rows: int, y: int, y_stride: int, /) -> None: ...
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
def rope_kv_write(
    qkv: int,
    qkv_stride: int,
    num_tokens: int,
    positions: int,
    cos_sin: int,
    rotary_dim: int,
    q_norm: int,
    k_norm: int,
    norm_eps: float,
    cache: int,
    cache_type: int,
    stride_block: int,
    stride_kv: int,
    stride_head: int,
    stride_slot: int,
    block_size: int,
    slot_mapping: int,
    q_out: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    /,
) -> None: ...
def attention(
    q: int,
    cache: int,
    cache_type: int,
    stride_block: int,
    stride_kv: int,
    stride_head: int,
    stride_slot: int,
    block_size: int,
    block_table: int,
    block_table_stride: int,
    query_start: int,
    seq_lens: int,
    num_requests: int,
    sinks: int,
    out: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    softcap: float,
    /,
) -> None: ...
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
