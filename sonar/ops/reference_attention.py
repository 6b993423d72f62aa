"""Rotation, cache write and paged attention in plain torch.

Attention gathers the keys and values that a request's queries may see and computes dense masked attention in float32;
decodes are batched, longer queries go request by request. Reads lengths on the host, which synchronizes a GPU.
Built into the reference table by `sonar.ops.reference`.

Legend beyond `sonar.ops.table`: N requests computed together, Q queries of each, C gathered context tokens, X anything
else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.ops.reference_norm import rms_norm
from sonar.ops.table import AttentionMetadata, AttentionSpec

# Bounds on the numbers gathered and on the scores held at once (float32: 128 MB each).
_MAX_GATHERED = 1 << 25
_MAX_SCORES = 1 << 25


def rope_kv_write(
    qkv_TX: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor | None,
    q_norm_E: Tensor | None,
    k_norm_E: Tensor | None,
    norm_eps: float,
    kv_cache: Tensor,
    slot_mapping_T: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """See `sonar.ops.table.RopeKVWriteFn`."""
    num_q, num_kv = spec.num_heads, spec.num_kv_heads
    heads_TXE = qkv_TX.reshape(qkv_TX.shape[0], num_q + 2 * num_kv, spec.head_dim)
    q_THE, k_TGE, v_TGE = torch.split(heads_TXE, [num_q, num_kv, num_kv], dim=1)
    if q_norm_E is not None:
        q_THE = rms_norm(q_THE, q_norm_E, norm_eps)
    if k_norm_E is not None:
        k_TGE = rms_norm(k_TGE, k_norm_E, norm_eps)
    if cos_sin_PR is not None:
        cos_T1X, sin_T1X = cos_sin_PR.index_select(0, positions_T).unsqueeze(1).chunk(2, dim=-1)
        q_THE = rotate(q_THE, cos_T1X, sin_T1X)
        k_TGE = rotate(k_TGE, cos_T1X, sin_T1X)
    block_size = kv_cache.shape[3]
    where_T = (slot_mapping_T // block_size, slot_mapping_T % block_size)
    cache_BZ2GE = kv_cache.permute(0, 3, 1, 2, 4)
    cache_BZ2GE.index_put_(where_T, torch.stack((k_TGE, v_TGE), dim=1).to(kv_cache.dtype))
    return q_THE.contiguous()


def rotate(x_THE: Tensor, cos_T1X: Tensor, sin_T1X: Tensor) -> Tensor:
    """Rotates the pairs (i, i + rotary_dim / 2) of each head in float32; the rest of a head passes through."""
    half = cos_T1X.shape[-1]
    first, second, rest = torch.split(x_THE, [half, half, x_THE.shape[-1] - 2 * half], dim=-1)
    first, second = first.to(torch.float32), second.to(torch.float32)
    rotated = torch.cat((first * cos_T1X - second * sin_T1X, second * cos_T1X + first * sin_T1X), dim=-1)
    return torch.cat((rotated.to(x_THE.dtype), rest), dim=-1)


def paged_attention(
    q_THE: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `sonar.ops.table.PagedAttentionFn`."""
    query_start, seq_lens = metadata.query_start_R1.tolist(), metadata.seq_lens_R.tolist()
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    for first, last in _decode_groups(seq_lens[: metadata.num_decodes], spec):
        q_N1HE = q_THE[first:last].unsqueeze(1)
        lens = seq_lens[first:last]
        out_THE[first:last] = _attend(q_N1HE, kv_cache, metadata.block_table_RB[first:last], lens, spec, sinks_H)[:, 0]
    for request in range(metadata.num_decodes, len(seq_lens)):
        rows = slice(query_start[request], query_start[request + 1])
        table_1B = metadata.block_table_RB[request : request + 1]
        out_THE[rows] = _attend_long(q_THE[rows], kv_cache, table_1B, seq_lens[request], spec, sinks_H)
    return out_THE.flatten(1)


def _decode_groups(seq_lens: list[int], spec: AttentionSpec) -> list[tuple[int, int]]:
    """Cuts the decodes into runs whose gathered K and V, padded to the longest, stay within the bound."""
    if not seq_lens:
        return []
    longest = min(max(seq_lens), spec.window or max(seq_lens))
    step = max(1, _MAX_GATHERED // (2 * longest * spec.num_kv_heads * spec.head_dim))
    return [(first, min(first + step, len(seq_lens))) for first in range(0, len(seq_lens), step)]


def _attend_long(
    q_QHE: Tensor,
    kv_cache: Tensor,
    block_table_1B: Tensor,
    seq_len: int,
    spec: AttentionSpec,
    sinks_H: Tensor | None,
) -> Tensor:
    """One request with several queries, in runs of queries whose scores stay within the bound."""
    num_queries = q_QHE.shape[0]
    num_context = min(seq_len, num_queries + spec.window) if spec.window else seq_len
    step = max(1, _MAX_SCORES // (spec.num_heads * num_context))
    out = []
    for first in range(0, num_queries, step):
        last = min(first + step, num_queries)
        end = seq_len - num_queries + last
        out.append(_attend(q_QHE[first:last].unsqueeze(0), kv_cache, block_table_1B, [end], spec, sinks_H)[0])
    return out[0] if len(out) == 1 else torch.cat(out)


def _attend(
    q_NQHE: Tensor,
    kv_cache: Tensor,
    block_table_NB: Tensor,
    ends: list[int],
    spec: AttentionSpec,
    sinks_H: Tensor | None,
) -> Tensor:
    """Queries at the last Q positions before `ends` of each request, over what they may see: (N, Q, H, E)."""
    num_queries, device = q_NQHE.shape[1], q_NQHE.device
    starts = [max(0, end - num_queries - spec.window + 1) if spec.window else 0 for end in ends]
    num_context = max(end - start for start, end in zip(starts, ends, strict=True))
    start_N1, end_N1 = torch.tensor([starts, ends], device=device).unsqueeze(-1)
    key_positions_NC = start_N1 + torch.arange(num_context, device=device)
    # Past a request's end the last token is gathered again: never an entry of the table or a slot that is not its own.
    k_NCGE, v_NCGE = _gather(kv_cache, block_table_NB, key_positions_NC.minimum(end_N1 - 1))
    query_positions_NQ = end_N1 - num_queries + torch.arange(num_queries, device=device)
    distance_NQC = query_positions_NQ.unsqueeze(-1) - key_positions_NC.unsqueeze(1)
    seen_NQC = distance_NQC >= 0
    if spec.window:
        seen_NQC &= distance_NQC < spec.window
    return _masked_attention(q_NQHE, k_NCGE, v_NCGE, seen_NQC, spec, sinks_H)


def _gather(kv_cache: Tensor, block_table_NB: Tensor, positions_NC: Tensor) -> tuple[Tensor, Tensor]:
    block_size = kv_cache.shape[3]
    blocks_NC = block_table_NB.gather(1, positions_NC // block_size).to(torch.int64)
    kv_NC2GE = kv_cache[blocks_NC, :, :, positions_NC % block_size].to(torch.float32)
    k_NCGE, v_NCGE = kv_NC2GE.unbind(2)
    return k_NCGE, v_NCGE


def _masked_attention(
    q_NQHE: Tensor,
    k_NCGE: Tensor,
    v_NCGE: Tensor,
    seen_NQC: Tensor,
    spec: AttentionSpec,
    sinks_H: Tensor | None,
) -> Tensor:
    """Dense grouped-query attention in float32; query head h reads kv head h // (H / G)."""
    num, num_queries, num_heads, head_dim = q_NQHE.shape
    num_kv = spec.num_kv_heads
    q_NGXE = q_NQHE.to(torch.float32).transpose(1, 2).reshape(num, num_kv, -1, head_dim)
    scores_NGXC = (q_NGXE @ k_NCGE.permute(0, 2, 3, 1)).mul_(spec.scale)
    if spec.softcap:
        scores_NGXC.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores_NHQC = scores_NGXC.view(num, num_heads, num_queries, -1)
    scores_NHQC.masked_fill_(~seen_NQC.unsqueeze(1), float("-inf"))
    if sinks_H is not None:
        sinks_NHQ1 = sinks_H.to(torch.float32).view(1, -1, 1, 1).expand(num, -1, num_queries, 1)
        weights_NHQC = torch.cat((scores_NHQC, sinks_NHQ1), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights_NHQC = scores_NHQC.softmax(dim=-1)
    out_NGXE = weights_NHQC.reshape(scores_NGXC.shape) @ v_NCGE.transpose(1, 2)
    return out_NGXE.view(num, num_heads, num_queries, head_dim).transpose(1, 2).to(q_NQHE.dtype)
