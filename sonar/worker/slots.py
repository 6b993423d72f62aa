"""What a rank keeps of each slot between steps, and the only code that changes it.

A slot is a seat in the batch: a request sits in it from admission to release, and `StepBatch` refers to it by number so
that a decode step carries no token, no setting and no table. Knows nothing of requests' ids, of priorities or of who
decides. Called by the model runner; read by inputs and sampler.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import torch
from numpy.typing import NDArray

from sonar.messages import AdmittedRequest, StepBatch
from sonar.sampling_params import SamplingParams
from sonar.worker.block_tables import BlockTables
from sonar.worker.history import TokenHistory


class Option(IntFlag):
    """What a request asks of the sampler beyond a plain draw; a step whose rows ask for none looks no further."""

    FILTER = 1
    BIAS = 2
    BAD_WORDS = 4
    REPETITION = 8
    COUNTS = 16
    MIN_TOKENS = 32
    LOGPROBS = 64
    PROMPT_LOGPROBS = 128
    SAMPLED = 256


class SlotTable:
    """Owns history, block tables and sampling settings of all slots of a rank.

    Attributes:
        history: known tokens. block_tables: cache blocks.
        params: the settings as sent; None for a slot never used.
        options: `Option` bits. prompt_len, min_tokens, seed: int64. top_k: int32, 0 = off.
        floats: float32 (slots, 7): columns `FLOAT_FIELDS`.
        version: grows with every admission: whatever was derived from slots' settings under an older one may be stale.
    """

    FLOAT_FIELDS = (
        "temperature",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )

    def __init__(
        self, *, num_slots: int, max_model_len: int, block_size: int, num_groups: int, device: torch.device
    ) -> None:
        # One token more than max_model_len: an overlapped step may run on past the end before the host sees it.
        self.history = TokenHistory(num_slots, max_model_len + 1, device)
        self.block_tables = BlockTables(num_groups, num_slots, -(-(max_model_len + 1) // block_size), device)
        self.params: list[SamplingParams | None] = [None] * num_slots
        self.options: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.prompt_len: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.min_tokens: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.seed: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.top_k: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self.floats: NDArray[np.float32] = np.zeros((num_slots, len(self.FLOAT_FIELDS)), dtype=np.float32)
        self.version = 0

    def apply(self, batch: StepBatch) -> None:
        """Applies a step's changes in the order its contract states: released, admitted, new_blocks."""
        for slot in batch.released:
            self.history.release(slot)
        if batch.admitted:
            self.history.admit(batch.admitted)
            for request in batch.admitted:
                self._seat(request)
            self.version += 1
        self.block_tables.apply(batch.new_blocks)

    def settings(self, slot: int) -> SamplingParams:
        """The sampling settings of an occupied slot."""
        params = self.params[slot]
        assert params is not None, f"slot {slot} was never admitted"
        return params

    def _seat(self, request: AdmittedRequest) -> None:
        slot, params = request.slot, request.sampling
        assert params.seed is not None, f"slot {slot}: a request reaches a rank with its seed"
        self.params[slot] = params
        self.options[slot] = options_of(params)
        self.prompt_len[slot] = request.prompt_len
        self.min_tokens[slot] = params.min_tokens
        self.seed[slot] = params.seed
        self.top_k[slot] = max(params.top_k, 0)
        self.floats[slot] = [getattr(params, name) for name in self.FLOAT_FIELDS]


def options_of(params: SamplingParams) -> Option:
    """Which of the sampler's stages a request needs."""
    filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0
    asked = {
        Option.SAMPLED: not params.is_greedy,
        Option.FILTER: filtered and not params.is_greedy,
        Option.BIAS: bool(params.logit_bias),
        Option.BAD_WORDS: bool(params.bad_words),
        Option.REPETITION: params.repetition_penalty != 1.0,
        Option.COUNTS: params.presence_penalty != 0.0 or params.frequency_penalty != 0.0,
        Option.MIN_TOKENS: params.min_tokens > 0,
        Option.LOGPROBS: params.logprobs is not None,
        Option.PROMPT_LOGPROBS: params.prompt_logprobs is not None,
    }
    options = Option(0)
    for option, is_asked in asked.items():
        if is_asked:
            options |= option
    return options
