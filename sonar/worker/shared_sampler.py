"""Draws from logits whose columns are spread over tensor-parallel ranks; every rank ends up with every token.

Greedy rows and draws without filters need no gathered logits: each rank draws from its own columns, with the noise of
the tokens' real ids, and the ranks compare (value, id), 16 bytes a row. Filters, penalties, bans and log-probabilities
look at all columns: these are gathered on rank 0, which draws as it would alone. Wraps a `Sampler`; called by the model
runner in its place.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonar.ops.reference_sample import gumbel_noise
from sonar.ops.table import SampleFn, SamplingTensors, TensorParallel
from sonar.worker.draw_plan import DrawPlan
from sonar.worker.sampler import Drawn, Sampler
from sonar.worker.slots import SlotTable

_WORD = 0xFFFFFFFF
_GOLDEN_32 = 0x9E3779B1


class SharedSampler:
    """Implements what the model runner asks of a `Sampler`; owns nothing.

    Args:
        sampler: of this rank, over the whole vocabulary. slots: its history takes the tokens.
    """

    def __init__(
        self, sampler: Sampler, slots: SlotTable, sample: SampleFn, vocab_size: int, parallel: TensorParallel
    ) -> None:
        self._sampler = sampler
        self._slots = slots
        self._sample = sample
        self._vocab_size = vocab_size
        self._parallel = parallel
        self._first_token = parallel.vocabulary(vocab_size)[0]

    def plan(self, slot_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> DrawPlan:
        return self._sampler.plan(slot_ids, positions)

    def whole(self, logits_SV: Tensor) -> Tensor | None:
        return self._parallel.gather_columns(logits_SV, self._vocab_size)

    def draw(self, logits_SV: Tensor, plan: DrawPlan, write_S: Tensor, greedy_S: Tensor | None = None) -> Drawn:
        if _needs_no_other_column(plan):
            token_S = self._draw_apart(logits_SV, plan.sampling, greedy_S)
            self._slots.history.write(write_S, token_S)
            return Drawn(token_S, None)
        whole_SV = self.whole(logits_SV)
        if whole_SV is not None:
            drawn = self._sampler.draw(whole_SV, plan, write_S)
            self._parallel.broadcast(drawn.token_S)
            return drawn
        token_S = torch.empty(logits_SV.shape[0], dtype=torch.int64, device=logits_SV.device)
        token_S = self._parallel.broadcast(token_S)
        self._slots.history.write(write_S, token_S)
        return Drawn(token_S, None)

    def _draw_apart(self, logits_SV: Tensor, sampling: SamplingTensors, greedy_S: Tensor | None) -> Tensor:
        """greedy_S: the likeliest of this rank's columns, where the forward pass has found it already."""
        if sampling.all_greedy:
            token_S = self._sample(logits_SV, sampling) if greedy_S is None else greedy_S
            value_S = logits_SV.gather(1, token_S.unsqueeze(1)).squeeze(1)
        else:
            token_S, value_S = self._draw_with_noise(logits_SV, sampling)
        pair_S2 = torch.stack([value_S.double(), (token_S + self._first_token).double()], dim=1)
        pairs_RS2 = self._parallel.gather_pairs(pair_S2)
        # Ranks hold ascending ids and argmax keeps the first of equal values, so ties go to the lower id.
        best_S1 = pairs_RS2[:, :, 0].argmax(dim=0, keepdim=True)
        return pairs_RS2[:, :, 1].gather(0, best_S1).squeeze(0).to(torch.int64)

    def _draw_with_noise(self, logits_SV: Tensor, sampling: SamplingTensors) -> tuple[Tensor, Tensor]:
        """The rank's own draw, and the value it won by."""
        is_greedy_S = sampling.temperature_S == 0
        ones_S = torch.ones_like(sampling.temperature_S)
        scaled_SV = logits_SV / torch.where(is_greedy_S, ones_S, sampling.temperature_S).unsqueeze(1)
        keys_S2 = shift_key(sampling.key_S2, self._first_token)
        apart = replace(sampling, temperature_S=torch.where(is_greedy_S, 0.0, ones_S), key_S2=keys_S2)
        token_S = self._sample(scaled_SV, apart)
        noise_S = gumbel_noise(shift_key(keys_S2, token_S), 1).squeeze(1)
        value_S = scaled_SV.gather(1, token_S.unsqueeze(1)).squeeze(1)
        return token_S, value_S + noise_S.masked_fill(is_greedy_S, 0.0)


def shift_key(key_S2: Tensor, by: int | Tensor) -> Tensor:
    """The key under which token v has the noise that v + `by` has under the given one: `SampleFn`'s hash starts from
    v * golden + key0. Products wrap at 64 bits, which leaves the low 32 right."""
    key0_S, key1_S = key_S2.unbind(1)
    return torch.stack([(key0_S + by * _GOLDEN_32) & _WORD, key1_S], dim=1)


def _needs_no_other_column(plan: DrawPlan) -> bool:
    composition = plan.composition
    looks_around = (
        composition.logprobs is not None
        or composition.bias is not None
        or composition.words is not None
        or composition.penalties is not None
        or plan.bans is not None
    )
    return not looks_around and (plan.sampling.all_greedy or not plan.sampling.any_filter)
