"""Activations from one pipeline stage to the next, and drawn tokens from the last one back to the first.

Each pair of ranks of neighbouring stages (and of the last and the first) has a group of its own, so that what goes one
way never waits for what goes the other. Shapes are known to both sides from the step's batch. Knows nothing of models.
Made by `groups`, used by the worker's staged runner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonar.config import ParallelConfig
from sonar.distributed.tensor_parallel import collective


@dataclass
class PipelineCounts:
    """Messages that this rank sent, and their bytes."""

    sends: int = 0
    send_bytes: int = 0


class PipelineLinks:
    """One rank's links along the pipeline.

    Args:
        hidden: the group of the ranks of this place in all stages, for activations.
    """

    def __init__(self, hidden: dist.ProcessGroup, parallel: ParallelConfig) -> None:
        self.counts = PipelineCounts()
        self.is_first = parallel.pp_rank == 0
        self.is_last = parallel.pp_rank == parallel.pp_size - 1
        self.num_stages = parallel.pp_size
        self._hidden = hidden
        self._tokens = self._make_token_group(parallel)
        self._rank = parallel.rank
        self._stride = parallel.stage_size
        self._last = parallel.rank % self._stride + self._stride * (parallel.pp_size - 1)

    @staticmethod
    def _make_token_group(parallel: ParallelConfig) -> dist.ProcessGroup:
        """Every rank takes part in making every group; it keeps its own."""
        own = None
        for place in range(parallel.stage_size):
            ranks = list(range(place, parallel.world_size, parallel.stage_size))
            group = dist.new_group(ranks)
            own = group if parallel.rank % parallel.stage_size == place else own
        assert isinstance(own, dist.ProcessGroup)
        return own

    @collective
    def send_hidden(self, hidden_TD: Tensor) -> dist.Work | None:
        """Starts to send to the next stage; the tensor must stay as it is until the work is done."""
        self._count(hidden_TD)
        return dist.isend(hidden_TD, self._rank + self._stride, group=self._hidden)

    @collective
    def receive_hidden(self, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Waits for the previous stage's (T, D)."""
        hidden_TD = torch.empty((num_tokens, hidden_size), dtype=dtype, device=device)
        dist.recv(hidden_TD, self._rank - self._stride, group=self._hidden)
        return hidden_TD

    @collective
    def send_tokens(self, token_S: Tensor) -> dist.Work | None:
        """From the last stage: starts to send the drawn tokens to the first."""
        self._count(token_S)
        return dist.isend(token_S, self._rank % self._stride, group=self._tokens)

    @collective
    def receive_tokens(self, num_tokens: int, device: torch.device) -> Tensor:
        """In the first stage: waits for the tokens of the oldest step whose tokens have not been received."""
        token_S = torch.empty(num_tokens, dtype=torch.int64, device=device)
        dist.recv(token_S, self._last, group=self._tokens)
        return token_S

    def _count(self, x: Tensor) -> None:
        self.counts.sends += 1
        self.counts.send_bytes += x.numel() * x.element_size()
