"""Cache groups: layers that keep the past in the same way share block tables.

Knows nothing of blocks' state or of tensors. Called by the planner, the manager, and whoever builds them from a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from sonar.config import LayerKind, ModelConfig


@dataclass(frozen=True)
class CacheGroup:
    """Layers of one kind.

    Attributes:
        layers: indices of its layers in the model.
        window: tokens a layer of a SLIDING group sees, the current one included; 0 for FULL.
    """

    kind: LayerKind
    layers: tuple[int, ...]
    window: int = 0

    def __post_init__(self) -> None:
        assert (self.window > 0) == (self.kind is LayerKind.SLIDING), f"window={self.window} of a {self.kind} group"

    def within(self, layers: range) -> CacheGroup:
        """The group with those of its layers that a pipeline stage computes, maybe none."""
        return CacheGroup(self.kind, tuple(layer for layer in self.layers if layer in layers), self.window)

    def first_block(self, position: int, block_size: int) -> int:
        """Index of the oldest block that computing the token at `position`, or any later one, may read."""
        if self.kind is LayerKind.FULL:
            return 0
        return max(0, position - self.window + 1) // block_size

    def max_blocks(self, num_tokens: int, chunk_tokens: int, block_size: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, when computed `chunk_tokens` at a time."""
        whole = -(-num_tokens // block_size)
        if self.kind is LayerKind.FULL:
            return whole
        # The chunk and the window before its first token; one more because both ends may lie within a block.
        return min(whole, -(-(self.window - 1 + chunk_tokens - 1) // block_size) + 1)


def cache_groups(model: ModelConfig) -> tuple[CacheGroup, ...]:
    """The model's cache groups, one a layer kind, in the order in which the kinds first appear among its layers."""
    return tuple(
        CacheGroup(
            kind=kind,
            layers=tuple(i for i, of in enumerate(model.layer_kinds) if of is kind),
            window=model.sliding_window if kind is LayerKind.SLIDING else 0,
        )
        for kind in dict.fromkeys(model.layer_kinds)
    )
