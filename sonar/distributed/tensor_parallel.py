"""The collectives of a tensor-parallel group, as layers and sampler ask for them (`sonar.ops.table.TensorParallel`).

On a GPU sums are the library's all-reduce. On a CPU the order of a sum must not depend on where in a tensor an element
lies (gloo's ring starts each piece at another rank, so a row's bits would depend on the rows beside it): two ranks add
alike in either order; more of them add in the order of ranks: small tensors after an all-gather, of large ones each a
share that is then gathered, which sends no more than a ring does. Knows nothing of models. Made by `groups`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sonar.distributed.shard_map import split
from sonar.errors import RemoteError

P = ParamSpec("P")
R = TypeVar("R")

# The one is deprecated since torch 2.13, the other did not exist before.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Up to here one all-gather of (size - 1) tensors beats two steps of less: below, latency decides.
_GATHER_BYTES = 64 << 10


def collective(function: Callable[P, R]) -> Callable[P, R]:
    """What torch raises when another rank has gone, as a `RemoteError`: this rank is not the one at fault."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            raise RemoteError(f"{function.__name__} with other ranks failed: {error}") from error

    return call


@dataclass
class CollectiveCounts:
    """What this rank has asked for: collectives by kind, and the bytes it sent to others for them."""

    sums: int = 0
    sum_bytes: int = 0
    gathers: int = 0
    gather_bytes: int = 0
    broadcasts: int = 0
    broadcast_bytes: int = 0


class TensorParallelGroup:
    """Owns nothing but counters: the process group belongs to `groups.RankGroups`.

    Args:
        group: of the ranks, in order. has_ring_sum: leave sums to the library (GPUs).
    """

    def __init__(self, group: dist.ProcessGroup, *, has_ring_sum: bool) -> None:
        self.counts = CollectiveCounts()
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._root = dist.get_global_rank(group, 0)
        self._is_plain_sum = has_ring_sum or self._size == 2

    @property
    def rank(self) -> int:
        """Place in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._size

    def vocabulary(self, vocab_size: int) -> tuple[int, int]:
        """See `TensorParallel.vocabulary`."""
        return split(vocab_size, self._size, self._rank)

    @collective
    def sum(self, x: Tensor) -> Tensor:
        """See `TensorParallel.sum`."""
        size_bytes = x.numel() * x.element_size()
        if not size_bytes:
            return x  # a step of other ranks: none of these has a row
        self.counts.sums += 1
        if self._is_plain_sum:
            self.counts.sum_bytes += 2 * (self._size - 1) * size_bytes // self._size
            dist.all_reduce(x, group=self._group)
            return x
        if size_bytes <= _GATHER_BYTES:
            self.counts.sum_bytes += (self._size - 1) * size_bytes
            return _ordered_sum(self._all_gather(x))
        self.counts.sum_bytes += 2 * (self._size - 1) * size_bytes // self._size
        return self._sum_shares(x)

    @collective
    def gather_columns(self, x_SV: Tensor, vocab_size: int) -> Tensor | None:
        """See `TensorParallel.gather_columns`. Uneven shares travel padded to the largest."""
        widths = [split(vocab_size, self._size, rank).size for rank in range(self._size)]
        padded_SV = x_SV.contiguous()
        if x_SV.shape[1] < widths[0]:
            padded_SV = torch.nn.functional.pad(x_SV, (0, widths[0] - x_SV.shape[1]))
        self.counts.gathers += 1
        if self._rank != 0:
            self.counts.gather_bytes += padded_SV.numel() * padded_SV.element_size()
            dist.gather(padded_SV, None, dst=self._root, group=self._group)
            return None
        pieces = [torch.empty_like(padded_SV) for _ in widths]
        dist.gather(padded_SV, pieces, dst=self._root, group=self._group)
        return torch.cat([piece[:, :width] for piece, width in zip(pieces, widths)], dim=1)

    @collective
    def gather_rows(self, x_TD: Tensor, num_rows: int) -> Tensor:
        """Each rank's share of so many rows (as `split` shares them out) as one tensor, on every rank."""
        if not num_rows:
            return x_TD
        sizes = [split(num_rows, self._size, rank).size for rank in range(self._size)]
        padded_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, sizes[0] - x_TD.shape[0]))
        self.counts.gathers += 1
        self.counts.gather_bytes += (self._size - 1) * padded_TD.numel() * padded_TD.element_size()
        pieces = self._all_gather(padded_TD)
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes)])

    @collective
    def gather_pairs(self, pairs_SC: Tensor) -> Tensor:
        """See `TensorParallel.gather_pairs`."""
        self.counts.gathers += 1
        self.counts.gather_bytes += (self._size - 1) * pairs_SC.numel() * pairs_SC.element_size()
        return self._all_gather(pairs_SC)

    @collective
    def broadcast(self, x: Tensor) -> Tensor:
        """See `TensorParallel.broadcast`."""
        self.counts.broadcasts += 1
        if self._rank == 0:
            self.counts.broadcast_bytes += (self._size - 1) * x.numel() * x.element_size()
        dist.broadcast(x, src=self._root, group=self._group)
        return x

    def _all_gather(self, x: Tensor) -> Tensor:
        """(size, *x.shape)."""
        out = torch.empty((self._size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        _all_gather_into(out, x.contiguous(), group=self._group)
        return out.view(self._size, *x.shape)

    def _sum_shares(self, x: Tensor) -> Tensor:
        """Each rank adds up its share of the elements, in the order of the ranks, and hands it to all."""
        share = -(-x.numel() // self._size)
        padded = torch.zeros(share * self._size, dtype=x.dtype, device=x.device)
        padded[: x.numel()] = x.reshape(-1)
        arrived = torch.empty_like(padded)
        dist.all_to_all_single(arrived, padded, group=self._group)
        own = _ordered_sum(arrived.view(self._size, share))
        _all_gather_into(padded, own, group=self._group)
        return padded[: x.numel()].view(x.shape)


def _ordered_sum(parts: Tensor) -> Tensor:
    """((first + second) + third) + ..., elementwise."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total
