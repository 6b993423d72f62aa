"""What a rank of a pipeline does around its layers: take activations in, pass them on, bring drawn tokens to the start.

The first stage needs the tokens that the last one draws, as the inputs of later steps, but must not wait for them while
it could compute for other requests: it takes those of a step before it computes for a slot of it again or gives the
slot away, and at the latest when as many steps have followed as there are stages, for no more are under way. Knows
nothing of models. Called by the model runner, in its thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sonar.distributed.pipeline import PipelineLinks
from sonar.messages import StepBatch
from sonar.models.base import ForwardBatch
from sonar.worker.history import TokenHistory


class _Awaited(NamedTuple):
    """A step whose tokens the first stage has not taken yet; write_S: their places in the history."""

    step: int
    slots: frozenset[int]
    write_S: Tensor


class _Sent(NamedTuple):
    """A message under way; the tensor must live until the work is done."""

    work: dist.Work | None
    tensor: Tensor


class PipelineStage:
    """Owns what is under way between this stage and its neighbours.

    Args:
        history: of this rank's slots. hidden_size, dtype, device: of activations.
    """

    def __init__(
        self, links: PipelineLinks, history: TokenHistory, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.is_last = links.is_last
        self._links = links
        self._history = history
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._awaited: deque[_Awaited] = deque()
        self._sent: deque[_Sent] = deque()

    def settle(self, batch: StepBatch) -> None:
        """Before a step's slot changes: takes the tokens that this step may read, or whose places it gives away."""
        touched = {*batch.slots, *batch.released, *(request.slot for request in batch.admitted)}
        newest_known = batch.step - self._links.num_stages
        while self._awaited and (
            self._awaited[0].step <= newest_known or any(touched & step.slots for step in self._awaited)
        ):
            step = self._awaited.popleft()
            token_S = self._links.receive_tokens(step.write_S.shape[0], self._device)
            self._history.write(step.write_S, token_S)

    def with_hidden(self, forward: ForwardBatch) -> ForwardBatch:
        """The step with what the previous stage computed of it."""
        if self._links.is_first:
            return forward
        num_tokens = forward.positions_T.shape[0]
        if not num_tokens:  # the stage before sends nothing either
            none_TD = torch.empty((0, self._hidden_size), dtype=self._dtype, device=self._device)
            return replace(forward, hidden_TD=none_TD)
        hidden_TD = self._links.receive_hidden(num_tokens, self._hidden_size, self._dtype, self._device)
        return replace(forward, hidden_TD=hidden_TD)

    def pass_on(self, hidden_TD: Tensor, batch: StepBatch, write_S: Tensor) -> None:
        """Sends activations to the next stage; the first stage will want the step's tokens."""
        self._keep(self._links.send_hidden(hidden_TD), hidden_TD)
        if self._links.is_first and write_S.shape[0]:
            sampled = frozenset(slot for slot, is_sampled in zip(batch.slots, batch.samples) if is_sampled)
            # On a CPU the places lie in memory that the next step's inputs take over.
            self._awaited.append(_Awaited(batch.step, sampled, write_S.clone()))

    def send_tokens(self, token_S: Tensor) -> None:
        """From the last stage to the first."""
        self._keep(self._links.send_tokens(token_S), token_S)

    def _keep(self, work: dist.Work | None, tensor: Tensor) -> None:
        """Remembers a message under way. One that the other side takes only after later steps is not waited for."""
        self._sent.append(_Sent(work, tensor))
        while len(self._sent) > 2 * self._links.num_stages + 2:
            oldest = self._sent.popleft()
            if oldest.work is not None:
                oldest.work.wait()
