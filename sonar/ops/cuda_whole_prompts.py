"""Attention of whole prompts of one length by cuDNN, through torch: faster than the paged kernel, for what it can do.

Gathers K and V of the step from the cache into contiguous tensors, a few percent of the time that attention takes.
Called by `sonar.ops.cuda_attention`, which asks `can_serve` first.

Measured on an H200, 32/8 heads of 128, bf16, TFLOP/s of cuDNN and of the paged kernel: 1 x 4096 529/350, 4 x 4096
606/360, 32 x 512 380/200.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sonar.ops.cuda_launch import ceil_div
from sonar.ops.table import AttentionMetadata, AttentionSpec

# Each new pair of shape costs cuDNN a plan; below this the paged kernel is soon done anyway.
_MIN_TOKENS = 2048
_MIN_LENGTH = 256
_HEAD_DIMS = (64, 128)


@triton.jit(do_not_specialize=["length", "table_stride"])
def _gather_kernel(
    cache_ptr,
    table_ptr,
    out_ptr,
    length,
    table_stride,
    block_stride,
    kv_stride,
    head_stride,
    token_stride,
    kv_out_stride,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One block of one request: its K, then its V, to (2, R, L, G, E)."""
    column = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    block = tl.load(table_ptr + request * table_stride + column).to(tl.int64)
    offsets = tl.arange(0, BLOCK_SIZE)
    dims = tl.arange(0, HEAD_DIM)
    mask = (column * BLOCK_SIZE + offsets < length)[:, None]
    source = cache_ptr + block * block_stride + head * head_stride + offsets[:, None] * token_stride + dims[None, :]
    tokens = request * length + column * BLOCK_SIZE + offsets
    target = out_ptr + (tokens[:, None] * NUM_KV + head) * HEAD_DIM + dims[None, :]
    k = tl.load(source, mask=mask)
    v = tl.load(source + kv_stride, mask=mask)
    tl.store(target, k, mask=mask)
    tl.store(target + kv_out_stride, v, mask=mask)


def can_serve(q_THE: Tensor, metadata: AttentionMetadata, spec: AttentionSpec, sinks_H: Tensor | None) -> bool:
    """Whether a step is nothing but whole prompts of one length, of a kind that cuDNN's causal attention knows.

    Queries of R requests are at most R x max_query_len. If they are that many, every request has max_query_len of them;
    if no sequence is longer than that either, none has a past.
    """
    num_requests, length = metadata.seq_lens_R.shape[0], metadata.max_query_len
    is_plain = not spec.window and not spec.softcap and sinks_H is None and spec.head_dim in _HEAD_DIMS
    is_whole = q_THE.shape[0] == num_requests * length and metadata.max_seq_len == length
    is_large = length >= _MIN_LENGTH and q_THE.shape[0] >= _MIN_TOKENS
    return is_plain and is_whole and is_large and q_THE.dtype.itemsize == 2 and torch.version.hip is None


def attend_whole_prompts(q_THE: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec) -> Tensor:
    """Attention of a step that `can_serve`: (T, H * E)."""
    num_requests, length = metadata.seq_lens_R.shape[0], metadata.max_query_len
    num_kv, head_dim, block_size = spec.num_kv_heads, spec.head_dim, kv_cache.shape[3]
    shape = (2, num_requests, length, num_kv, head_dim)
    kv_2RLGE = torch.empty(shape, dtype=kv_cache.dtype, device=kv_cache.device)
    _gather_kernel[(ceil_div(length, block_size), num_requests, num_kv)](
        kv_cache,
        metadata.block_table_RB,
        kv_2RLGE,
        length,
        metadata.block_table_RB.stride(0),
        *kv_cache.stride()[:4],
        kv_2RLGE.stride(0),
        NUM_KV=num_kv,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        num_warps=2,
    )
    q_RHLE = q_THE.view(num_requests, length, spec.num_heads, head_dim).transpose(1, 2)
    k_RGLE, v_RGLE = kv_2RLGE[0].transpose(1, 2), kv_2RLGE[1].transpose(1, 2)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out_RHLE = F.scaled_dot_product_attention(
            q_RHLE, k_RGLE, v_RGLE, is_causal=True, scale=spec.scale, enable_gqa=True
        )
    return out_RHLE.transpose(1, 2).reshape(q_THE.shape[0], -1)
