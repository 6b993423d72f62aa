"""What a machine's ceilings allow a model file: tokens a second if nothing but weights and arithmetic took time.

Attention, norms, draws and everything that is not a matrix of weights are left out: the limits cannot be reached.
Called by `benchmarks.peers.offline`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from benchmarks.cpu.kernels import Ceilings
from sonar.gguf_file import GGUFFile

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class ModelCost:
    """What a token asks of the weights.

    Attributes:
        read_bytes: of all matrices, as stored, once. layer_ops: multiplications and additions of a token in the layers.
            head_ops: of its logits.
    """

    read_bytes: int
    layer_ops: int
    head_ops: int

    def prompt(self, ceilings: Ceilings, num_tokens: int) -> float:
        """Prompt tokens a second of 8-bit arithmetic; one token of the prompt gets logits."""
        operations = num_tokens * self.layer_ops + self.head_ops
        return num_tokens / max(operations / ceilings.integer_ops, self.read_bytes / ceilings.read)

    def decode(self, ceilings: Ceilings, num_streams: int) -> float:
        """Tokens a second of all streams, which share each reading of the weights."""
        operations = num_streams * (self.layer_ops + self.head_ops)
        return num_streams / max(operations / ceilings.integer_ops, self.read_bytes / ceilings.read)


def read_cost(path: Path) -> ModelCost:
    """From the file's table of tensors. An embedding that is no head too is looked up, not multiplied."""
    matrices = {name: tensor for name, tensor in GGUFFile(path).tensors.items() if len(tensor.shape) == 2}
    head = matrices[_HEAD if _HEAD in matrices else _EMBEDDING]
    layers = [tensor for name, tensor in matrices.items() if name not in (_EMBEDDING, _HEAD)]
    read_bytes = head.size_bytes + sum(tensor.size_bytes for tensor in layers)
    return ModelCost(read_bytes, 2 * sum(prod(tensor.shape) for tensor in layers), 2 * prod(head.shape))
