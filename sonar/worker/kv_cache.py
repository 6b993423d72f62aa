"""The memory of the paged KV cache on one rank: one tensor a cache group, and the views that layers read and write.

Shape of a group: (num_blocks, L, 2, G, Z, E), contiguous; with latent attention (num_blocks, L, 1, 1, Z, C + R), the
numbers of `ModelConfig.cache_shape`. A block is one contiguous piece over all layers of its group,
so that moving it to another replica is one descriptor (measured on device memory: a transfer wants megabytes, not
kilobytes, a descriptor). Knows nothing of which block belongs to whom. Called by the model runner.

Legend: L layers of the group, G kv heads of this rank, Z block size, E head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sonar.errors import CapacityError
from sonar.kvcache.groups import CacheGroup
from sonar.ops.cpu_arena import map_zeros


@dataclass(frozen=True)
class CacheLayout:
    """The shape of a rank's cache.

    Attributes:
        groups: in the order by which messages number them (`sonar.kvcache.groups.cache_groups`), with the layers of
            this rank's pipeline stage, of which a group may have none.
        num_planes, num_kv_heads, head_dim: as `ModelConfig.cache_shape`.
    """

    groups: tuple[CacheGroup, ...]
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    num_planes: int = 2

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Group index of every layer of this rank, in the order of the layers."""
        owner = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return tuple(owner[layer] for layer in sorted(owner))

    @property
    def token_bytes(self) -> int:
        """Bytes of what one layer caches of one token."""
        return self.num_planes * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of a group, over all its layers."""
        return len(self.groups[group].layers) * self.block_size * self.token_bytes


class KVCache:
    """Owns the cache tensors of a rank.

    Args:
        num_blocks: per group.

    Raises:
        CapacityError: the device cannot give that much; says what is needed and what there is.
    """

    def __init__(self, layout: CacheLayout, num_blocks: tuple[int, ...], device: torch.device) -> None:
        assert len(num_blocks) == len(layout.groups), f"{num_blocks} for {len(layout.groups)} groups"
        self.layout = layout
        self.group_of_layer = layout.group_of_layer
        self.tensors = tuple(_allocate(layout, group, count, device) for group, count in enumerate(num_blocks))
        place = {layer: (g, i) for g, group in enumerate(layout.groups) for i, layer in enumerate(group.layers)}
        self.layers = tuple(self.tensors[g][:, i] for _, (g, i) in sorted(place.items()))

    @property
    def size_bytes(self) -> int:
        """Bytes of all groups."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def copy(self, copies: list[tuple[int, int, int]]) -> None:
        """Copies blocks in order: (group, source, destination)."""
        for group, source, destination in copies:
            self.tensors[group][destination].copy_(self.tensors[group][source])


def _allocate(layout: CacheLayout, group: int, num_blocks: int, device: torch.device) -> Tensor:
    """Zeros, because masked attention still multiplies what it masks, and zero times garbage may be NaN."""
    block = (
        len(layout.groups[group].layers),
        layout.num_planes,
        layout.num_kv_heads,
        layout.block_size,
        layout.head_dim,
    )
    needed = num_blocks * layout.block_bytes(group)
    try:
        if device.type == "cpu" and needed:  # a pipeline stage may have no layer of the group
            # The system commits memory when it is first written, so an idle cache costs nothing.
            return map_zeros(needed).view(layout.dtype).view(num_blocks, *block)
        return torch.zeros((num_blocks, *block), dtype=layout.dtype, device=device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        there_is = f"{available} bytes are free" if available else "the host refused"
        raise CapacityError(
            f"the KV cache needs {needed} bytes for {num_blocks} blocks and {there_is}; "
            "lower memory_bytes or memory_share, or free memory",
            param="memory_bytes",
        ) from error
