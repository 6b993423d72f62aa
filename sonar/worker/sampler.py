"""Draws the next tokens of a step from its logits, each row by its own request's settings.

Order: log-probabilities are taken of the raw logits; then logit_bias, bad_words, ids banned by min_tokens, repetition,
presence and frequency penalties; then the op `sample` (temperature, filters, draw). Bad words and the repetition
penalty see prompt and output, presence and frequency the output. The history they read includes the token of a step the
host has not seen yet. Knows nothing of models, blocks or scheduling. Called by the model runner.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonar.ops.table import SampleFn
from sonar.worker import logits_rules
from sonar.worker.draw_plan import Composition, DrawPlan, Vocabulary, compose, plan_draw
from sonar.worker.logprobs import TokenLogprobs, normalize, score
from sonar.worker.slots import SlotTable


class Drawn(NamedTuple):
    """A step's draw, on the device. logprobs: of the rows that asked (`DrawPlan.composition.logprobs`), or None."""

    token_S: Tensor
    logprobs: TokenLogprobs | None


class Sampler:
    """Owns the settings of the latest batch as tensors, which the next one uses again if its requests are the same.

    Args:
        slots: read for settings; its history is read and written.
        sample: the op.
    """

    def __init__(self, slots: SlotTable, sample: SampleFn, vocabulary: Vocabulary, device: torch.device) -> None:
        self._slots = slots
        self._sample = sample
        self._vocabulary = vocabulary
        self._device = device
        self._latest: DrawPlan | None = None
        self._latest_version = -1

    def plan(self, slot_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> DrawPlan:
        """Prepares the draw of one token for each slot, to stand at its position. Needs no logits: call it early."""
        latest = self._latest
        if latest is None or not self._is_fresh(latest.composition, slot_ids):
            composition = compose(slot_ids, self._slots, self._vocabulary, self._device)
            self._latest_version = self._slots.version
        elif latest.composition.follows_positions:
            composition = latest.composition
        else:
            return latest
        self._latest = plan_draw(composition, positions, self._slots, self._device)
        return self._latest

    def whole(self, logits_SV: Tensor) -> Tensor | None:
        """The logits over the whole vocabulary; None where another rank has them (`SharedSampler`)."""
        return logits_SV

    def draw(self, logits_SV: Tensor, plan: DrawPlan, write_S: Tensor, greedy_S: Tensor | None = None) -> Drawn:
        """Draws, and writes the tokens into the history, where the next step finds them.

        Args:
            logits_SV: float32, raw; overwritten. write_S: places in the history.
            greedy_S: likeliest token of each row of the raw logits, where the forward pass has found it already.
        """
        wanted = plan.composition.logprobs
        logprobs_NV = None
        if wanted is not None:
            logprobs_NV = normalize(logits_SV if wanted.row_N is None else logits_SV.index_select(0, wanted.row_N))
        if greedy_S is not None and plan.composition.is_plain_greedy:
            token_S = greedy_S
        else:
            self._apply_rules(logits_SV, plan)
            token_S = self._sample(logits_SV, plan.sampling)
        self._slots.history.write(write_S, token_S)
        if wanted is None or logprobs_NV is None:
            return Drawn(token_S, None)
        token_N = token_S if wanted.row_N is None else token_S.index_select(0, wanted.row_N)
        return Drawn(token_S, score(logprobs_NV, token_N, max(wanted.counts)))

    def _is_fresh(self, composition: Composition, slot_ids: NDArray[np.int64]) -> bool:
        if self._latest_version != self._slots.version:
            return False
        return composition.slots is slot_ids or np.array_equal(composition.slots, slot_ids)

    def _apply_rules(self, logits_SV: Tensor, plan: DrawPlan) -> None:
        composition, history = plan.composition, self._slots.history
        if composition.bias is not None:
            logits_rules.add_bias(logits_SV, composition.bias.entries, composition.bias.value_N)
        if composition.words is not None and plan.tail is not None:
            index_WM, exists_WM = plan.tail
            tail_WM = history.read(index_WM.reshape(-1)).view(index_WM.shape).masked_fill(~exists_WM, -2)
            logits_rules.ban_bad_words(logits_SV, composition.words.rules, tail_WM)
        if plan.bans is not None:
            logits_rules.ban(logits_SV, plan.bans)
        if composition.penalties is not None and plan.past is not None:
            rules, stages, _ = composition.penalties
            tokens_PL = history.rows(plan.past.pages_PX)
            logits_rules.penalize(logits_SV, rules, tokens_PL, plan.past.length_P, stages)
