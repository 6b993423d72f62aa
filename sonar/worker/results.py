"""A step's outcome on its way from the device to the engine loop.

On CUDA the copies to the host are queued behind the step, and waited for only when the loop collects the result, a step
later. Knows nothing of how the tokens were drawn. Called by the model runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sonar.messages import Logprob, StepResult
from sonar.worker.draw_plan import LogprobRows
from sonar.worker.logprobs import TokenLogprobs, unpack


class PromptScores(NamedTuple):
    """Log-probabilities of prompt positions: `counts[i]` rows of slot `slots[i]`, `alternatives[i]` each, in order."""

    slots: list[int]
    counts: list[int]
    alternatives: list[int]
    scored: TokenLogprobs


class StepOutcome(NamedTuple):
    """What a step computed, on the device.

    Attributes:
        token_S: drawn tokens, None when no row was sampled.
        asked: which of the S rows asked for log-probabilities, parallel to the rows of `logprobs`.
    """

    step: int
    num_sampled: int
    token_S: Tensor | None
    asked: LogprobRows | None
    logprobs: TokenLogprobs | None
    prompt: PromptScores | None


class PendingResult:
    """Copies of a `StepOutcome` to the host, under way.

    The copies start at construction, on the current stream of the calling thread.
    """

    def __init__(self, outcome: StepOutcome, device: torch.device) -> None:
        self._outcome = outcome
        self._event: torch.cuda.Event | None = None
        tensors: list[Tensor] = [] if outcome.token_S is None else [outcome.token_S]
        for scored in (outcome.logprobs, outcome.prompt.scored if outcome.prompt else None):
            tensors += scored or ()
        self._host = _to_host(tensors, device)
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> StepResult:
        """Waits for the device and unpacks."""
        if self._event is not None:
            self._event.synchronize()
        outcome, host = self._outcome, iter(self._host)
        token_ids = [] if outcome.token_S is None else next(host).tolist()
        logprobs: list[list[Logprob]] = []
        if outcome.asked is not None:
            logprobs = [[] for _ in range(outcome.num_sampled)]
            unpacked = unpack(TokenLogprobs(next(host), next(host), next(host)), outcome.asked.counts)
            for row, entries in zip(outcome.asked.rows, unpacked):
                logprobs[row] = entries
        prompt_logprobs = {}
        if outcome.prompt is not None:
            prompt_logprobs = _unpack_prompt(outcome.prompt, TokenLogprobs(next(host), next(host), next(host)))
        return StepResult(step=outcome.step, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def _to_host(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    if device.type == "cpu":
        return list(tensors)
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor, non_blocking=True)
    return copies


def _unpack_prompt(prompt: PromptScores, scored: TokenLogprobs) -> dict[int, list[list[Logprob]]]:
    per_row = [k for count, k in zip(prompt.counts, prompt.alternatives) for _ in range(count)]
    rows = unpack(scored, per_row)
    result: dict[int, list[list[Logprob]]] = {}
    start = 0
    for slot, count in zip(prompt.slots, prompt.counts):
        result[slot] = rows[start : start + count]
        start += count
    return result
