"""Which rows and columns of each named tensor a tensor-parallel rank owns. Pure and torch-free.

Projections into heads or intermediate features are split by rows (outputs), those back to the hidden size by columns
(inputs), embedding and head by rows of the vocabulary; the rest is whole on every rank. Of every expert each rank holds
its features, or it holds some experts whole. A bias of what is split by columns belongs to rank 0 alone, for the ranks'
outputs are summed. Splits may be uneven. When there are more ranks than KV heads, ranks share one, and divide its query
heads among them. Called by `sonar.weights.sharded_weights`, the loader, and tests; knows no formats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from sonar.config import ModelConfig
from sonar.errors import ConfigError

# Columns are cut where quantized formats begin a block: 256 numbers in the coarsest, 32 in most.
_COLUMN_UNITS = (256, 32)


class Span(NamedTuple):
    """Indices start to stop - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.stop - self.start

    def times(self, unit: int) -> Span:
        """The span of the elements when each index stands for `unit` of them."""
        return Span(self.start * unit, self.stop * unit)


class Cut(NamedTuple):
    """What a rank takes of a tensor: rows (None = all), in this order, or columns (None = all).

    whole: rows or columns of the whole tensor, where some are taken.
    is_zero: the rank takes zeros of that shape instead: another rank adds this tensor.
    """

    rows: tuple[Span, ...] | None = None
    columns: Span | None = None
    whole: int = 0
    is_zero: bool = False


class _Role(Enum):
    """What a tensor's rows or columns count."""

    QUERY = "query heads"
    KEY_VALUE = "kv heads"
    QKV = "query, key and value heads"
    FROM_HEADS = "columns of query heads"
    LATENT_UP = "keys and values of heads from their latent"
    FROM_VALUES = "columns of heads' values"
    SINKS = "one number a query head"
    INNER = "intermediate features"
    GATE_UP = "intermediate features twice"
    FROM_INNER = "columns of intermediate features"
    EXPERT = "features of one expert"
    FROM_EXPERT = "columns of one expert's features"
    SHARED = "features of the shared expert"
    FROM_SHARED = "columns of the shared expert's features"
    VOCABULARY = "vocabulary"


# The end of a tensor's name, without .weight or .bias. What matches none is whole on every rank.
_ROLES: dict[str, _Role] = {
    "self_attn.q_proj": _Role.QUERY,
    "self_attn.k_proj": _Role.KEY_VALUE,
    "self_attn.v_proj": _Role.KEY_VALUE,
    "self_attn.qkv_proj": _Role.QKV,
    "attn.c_attn": _Role.QKV,
    "self_attn.o_proj": _Role.FROM_HEADS,
    "attn.c_proj": _Role.FROM_HEADS,
    "self_attn.q_b_proj": _Role.QUERY,
    "self_attn.kv_b_proj": _Role.LATENT_UP,
    "self_attn.sinks": _Role.SINKS,
    "mlp.experts.*.gate_proj": _Role.EXPERT,
    "mlp.experts.*.up_proj": _Role.EXPERT,
    "mlp.experts.*.down_proj": _Role.FROM_EXPERT,
    "mlp.shared_expert.gate_proj": _Role.SHARED,
    "mlp.shared_expert.up_proj": _Role.SHARED,
    "mlp.shared_expert.down_proj": _Role.FROM_SHARED,
    "mlp.shared_experts.gate_proj": _Role.SHARED,
    "mlp.shared_experts.up_proj": _Role.SHARED,
    "mlp.shared_experts.down_proj": _Role.FROM_SHARED,
    "mlp.gate_proj": _Role.INNER,
    "mlp.up_proj": _Role.INNER,
    "mlp.gate_up_proj": _Role.GATE_UP,
    "mlp.c_fc": _Role.INNER,
    "mlp.down_proj": _Role.FROM_INNER,
    "mlp.c_proj": _Role.FROM_INNER,
    "model.embed_tokens": _Role.VOCABULARY,
    "transformer.wte": _Role.VOCABULARY,
    "lm_head": _Role.VOCABULARY,
}
_NAME = re.compile(r"(?:model\.layers\.\d+\.|transformer\.h\.\d+\.)?(.+?)(?:\.(weight|bias))?")
_EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+")


def split(count: int, parts: int, index: int, unit: int = 1) -> Span:
    """The index-th of `parts` contiguous pieces of 0 .. count-1, as even as multiples of `unit` allow; earlier pieces
    are the longer ones. count is a multiple of unit."""
    few, extra = divmod(count // unit, parts)
    start = index * few + min(index, extra)
    return Span(start, start + few + (index < extra)).times(unit)


@dataclass(frozen=True)
class ShardMap:
    """The part of one rank of a tensor-parallel group.

    Attributes:
        config: of the whole model.
        heads, kv_heads, inner, expert, shared, vocabulary: what the rank owns of each; expert: of every expert's
            features, shared: of the shared expert's; empty where there are none.
        has_whole_experts: what experts it has are whole: `expert` is all features.
    """

    config: ModelConfig
    tp_size: int
    tp_rank: int
    heads: Span
    kv_heads: Span
    inner: Span
    expert: Span
    shared: Span
    vocabulary: Span
    has_whole_experts: bool = False

    def local_config(self, stage: tuple[int, int] | None = None) -> ModelConfig:
        """The model's shape as this rank computes it; the vocabulary's size stays that of the model."""
        moe = self.config.moe
        if moe is not None:
            moe = replace(moe, intermediate_size=self.expert.size, shared_intermediate_size=self.shared.size)
        return replace(
            self.config,
            moe=moe,
            num_heads=self.heads.size,
            num_kv_heads=self.kv_heads.size,
            intermediate_size=self.inner.size,
            stage=stage,
        )

    def may_be_others(self, name: str) -> bool:
        """Whether a tensor is of an expert that another rank may hold instead."""
        moe, found = self.config.moe, _EXPERT_NUMBER.search(name)
        return self.has_whole_experts and moe is not None and found is not None and int(found[0]) < moe.num_experts

    def cut(self, name: str) -> Cut:
        """What the rank takes of a tensor, by Hugging Face's name."""
        found = _NAME.fullmatch(name)
        role = _ROLES.get(_EXPERT_NUMBER.sub("*", found[1])) if found else None
        if found is None or role is None:
            return Cut()
        if self.has_whole_experts and role in (_Role.EXPERT, _Role.FROM_EXPERT):
            return Cut()
        is_bias = found[2] == "bias"
        size, config, inner = self.config.head_dim, self.config, self.inner
        query, kv = self.heads.times(size), self.kv_heads.times(size)
        num_query, num_kv = config.num_heads * size, config.num_kv_heads * size
        match role:
            case _Role.QUERY:
                return Cut((query,), whole=num_query)
            case _Role.KEY_VALUE:
                return Cut((kv,), whole=num_kv)
            case _Role.QKV:
                key, value = _shift(kv, num_query), _shift(kv, num_query + num_kv)
                return Cut((query, key, value), whole=num_query + 2 * num_kv)
            case _Role.LATENT_UP | _Role.SINKS | _Role.FROM_VALUES:
                return self._cut_by_head(role)
            case _Role.FROM_HEADS | _Role.FROM_INNER | _Role.FROM_EXPERT | _Role.FROM_SHARED if is_bias:
                return Cut(is_zero=self.tp_rank != 0)
            case _Role.FROM_HEADS if config.mla is not None:
                return self._cut_by_head(_Role.FROM_VALUES)
            case _Role.EXPERT | _Role.FROM_EXPERT | _Role.SHARED | _Role.FROM_SHARED:
                return self._cut_experts(role)
            case _Role.INNER:
                return Cut((inner,), whole=config.intermediate_size)
            case _Role.GATE_UP:
                up = _shift(inner, config.intermediate_size)
                return Cut((inner, up), whole=2 * config.intermediate_size)
            case _Role.VOCABULARY:
                return Cut((self.vocabulary,), whole=config.vocab_size)
            case _Role.FROM_HEADS:
                return Cut(columns=query, whole=num_query)
            case _Role.FROM_INNER:
                return Cut(columns=inner, whole=config.intermediate_size)

    def _cut_by_head(self, role: _Role) -> Cut:
        """Tensors that have so many rows or columns a query head."""
        num_heads, mla = self.config.num_heads, self.config.mla
        if role is _Role.SINKS:
            return Cut((self.heads,), whole=num_heads)
        assert mla is not None, f"{role} in {self.config.architecture}"
        if role is _Role.FROM_VALUES:
            return Cut(columns=self.heads.times(mla.v_head_dim), whole=num_heads * mla.v_head_dim)
        size = mla.qk_nope_head_dim + mla.v_head_dim
        return Cut((self.heads.times(size),), whole=num_heads * size)

    def _cut_experts(self, role: _Role) -> Cut:
        moe = self.config.moe
        assert moe is not None, f"{role} in {self.config.architecture}"
        match role:
            case _Role.EXPERT:
                return Cut((self.expert,), whole=moe.intermediate_size)
            case _Role.FROM_EXPERT:
                return Cut(columns=self.expert, whole=moe.intermediate_size)
            case _Role.SHARED:
                return Cut((self.shared,), whole=moe.shared_intermediate_size)
            case _:
                return Cut(columns=self.shared, whole=moe.shared_intermediate_size)


def make_shard_map(config: ModelConfig, tp_size: int, tp_rank: int, *, has_whole_experts: bool = False) -> ShardMap:
    """The part of rank `tp_rank` of `tp_size`.

    Args:
        has_whole_experts: ranks share out the experts instead of each one's features.

    Raises:
        ConfigError: there are more ranks than heads, or than units of another split dimension.
    """
    if tp_size > config.num_heads or tp_size > config.vocab_size:
        raise ConfigError(
            f"tp_size={tp_size} for {config.num_heads} attention heads; choose at most {config.num_heads}",
            param="tp_size",
        )
    moe = config.moe
    heads, kv_heads = _split_heads(config, tp_size, tp_rank)
    if moe is not None and tp_size > moe.intermediate_size and not has_whole_experts:
        raise ConfigError(
            f"tp_size={tp_size} for experts of {moe.intermediate_size} features; choose fewer", param="tp_size"
        )
    inner = moe.intermediate_size if moe else 0
    return ShardMap(
        config=config,
        has_whole_experts=has_whole_experts,
        tp_size=tp_size,
        tp_rank=tp_rank,
        heads=heads,
        kv_heads=kv_heads,
        inner=_split_features(config.intermediate_size, tp_size, tp_rank),
        expert=_split_features(inner, 1, 0) if has_whole_experts else _split_features(inner, tp_size, tp_rank),
        shared=_split_features(moe.shared_intermediate_size if moe else 0, tp_size, tp_rank),
        vocabulary=split(config.vocab_size, tp_size, tp_rank),
    )


def _split_heads(config: ModelConfig, tp_size: int, tp_rank: int) -> tuple[Span, Span]:
    """Query and KV heads. Every rank keeps the ratio of the model, or has one KV head and some of its query heads."""
    group = config.num_heads // config.num_kv_heads
    if tp_size <= config.num_kv_heads:
        kv_heads = split(config.num_kv_heads, tp_size, tp_rank)
        return kv_heads.times(group), kv_heads
    for kv_head in range(config.num_kv_heads):
        sharers = split(tp_size, config.num_kv_heads, kv_head)
        if sharers.start <= tp_rank < sharers.stop:
            queries = split(group, sharers.size, tp_rank - sharers.start)
            return _shift(queries, kv_head * group), Span(kv_head, kv_head + 1)
    raise AssertionError(f"rank {tp_rank} of {tp_size} has no KV head of {config.num_kv_heads}")


def _split_features(size: int, tp_size: int, tp_rank: int) -> Span:
    return split(size, tp_size, tp_rank, _column_unit(size, tp_size))


def _column_unit(size: int, tp_size: int) -> int:
    """The coarsest block at which a split is still nearly even."""
    return next((unit for unit in _COLUMN_UNITS if size % unit == 0 and size // unit >= 4 * tp_size), 1)


def _shift(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)
