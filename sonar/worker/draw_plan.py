"""What one draw needs beside the logits: settings of its rows as tensors, keys, and places to read and write history.

Built on the host before the forward pass. Whatever follows from which requests are in the batch (`Composition`) is kept
while the batch stays the same, so that decode steps of the same requests rebuild nothing; keys and places alone follow
the positions. Knows nothing of logits. Called by the sampler.

Legend: S rows sampled from, P rows with penalties, N rows that want log-probabilities, W banned words, M tokens before
the last of the longest banned word, X pages of the longest history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonar.ops.draw_key import draw_key_of_mixed, mix_seed
from sonar.ops.table import SamplingTensors
from sonar.worker.logits_rules import BadWords, Entries, PenaltyRows, PenaltyStages
from sonar.worker.slots import Option, SlotTable
from sonar.worker.upload import upload

IntArray = NDArray[np.int64]


class Settings(NamedTuple):
    """Filters of every row, as `SamplingTensors` names them."""

    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    typical_p_S: Tensor


class Bias(NamedTuple):
    """Logits to shift."""

    entries: Entries
    value_N: Tensor


class Words(NamedTuple):
    """Banned words; `rows` is where each one's row lies among the sampled ones, on the host."""

    rules: BadWords
    rows: IntArray
    num_before: int


class Bans(NamedTuple):
    """Ids banned until a position is reached, one entry each, on the host."""

    rows: IntArray
    tokens: IntArray
    until: IntArray


class Penalties(NamedTuple):
    """Rows with penalties, on the device and on the host."""

    rules: PenaltyRows
    stages: PenaltyStages
    rows: IntArray


class LogprobRows(NamedTuple):
    """Rows that want log-probabilities. row_N: None = all. counts: alternatives of each. rows: on the host."""

    row_N: Tensor | None
    rows: list[int]
    counts: list[int]


@dataclass(frozen=True)
class Composition:
    """What follows from the rows' requests alone, whatever their positions; None where no row asks."""

    slots: IntArray
    mixed_seeds: NDArray[np.uint64]
    settings: Settings
    all_greedy: bool
    any_filter: bool
    bias: Bias | None
    words: Words | None
    bans: Bans | None
    penalties: Penalties | None
    logprobs: LogprobRows | None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether every row takes the likeliest token of its raw logits."""
        has_rules = self.words is not None or self.bans is not None or self.penalties is not None
        return self.all_greedy and self.bias is None and not has_rules

    @property
    def follows_positions(self) -> bool:
        """Whether a draw depends on the positions at all; of plain greedy rows it does not."""
        has_rules = self.words is not None or self.bans is not None or self.penalties is not None
        return has_rules or not self.all_greedy


class Tail(NamedTuple):
    """Places of the tokens before a drawn one, and whether they exist."""

    index_WM: Tensor
    exists_WM: Tensor


class Past(NamedTuple):
    """Pages holding the history of the penalized rows, and its length in tokens."""

    pages_PX: Tensor
    length_P: Tensor


@dataclass(frozen=True)
class DrawPlan:
    """One step's draw; None where no row asks."""

    composition: Composition
    sampling: SamplingTensors
    bans: Entries | None
    tail: Tail | None
    past: Past | None


class Vocabulary(NamedTuple):
    """What the sampler knows of token ids. size: logits a row. eos_token_ids: banned until min_tokens are out."""

    size: int
    eos_token_ids: tuple[int, ...]


def compose(slot_ids: IntArray, slots: SlotTable, vocabulary: Vocabulary, device: torch.device) -> Composition:
    """Gathers the settings of the given slots."""
    options = slots.options[slot_ids]
    union = Option(int(np.bitwise_or.reduce(options)))
    floats = slots.floats[slot_ids]
    columns = [np.ascontiguousarray(floats[:, i]) for i in range(floats.shape[1])]
    temperature, top_p, min_p, typical_p = upload(columns[:4], device)
    (top_k,) = upload([slots.top_k[slot_ids]], device)
    return Composition(
        slots=slot_ids,
        mixed_seeds=mix_seed(slots.seed[slot_ids]),
        settings=Settings(temperature, top_k, top_p, min_p, typical_p),
        all_greedy=Option.SAMPLED not in union,
        any_filter=Option.FILTER in union,
        bias=_bias(slot_ids, slots, device) if Option.BIAS in union else None,
        words=_words(slot_ids, slots, device) if Option.BAD_WORDS in union else None,
        bans=_bans(slot_ids, slots, vocabulary) if Option.MIN_TOKENS in union else None,
        penalties=_penalties(options, columns[4:], slots.prompt_len[slot_ids], device)
        if union & (Option.REPETITION | Option.COUNTS)
        else None,
        logprobs=_logprobs(slot_ids, slots, device) if Option.LOGPROBS in union else None,
    )


def plan_draw(composition: Composition, positions: IntArray, slots: SlotTable, device: torch.device) -> DrawPlan:
    """Completes a composition for the positions (S,) that the drawn tokens will take."""
    arrays: list[NDArray[Any]] = []
    if not composition.all_greedy:
        arrays.append(draw_key_of_mixed(composition.mixed_seeds, positions))
    banned = _active_bans(composition.bans, positions)
    arrays += [*banned, *_tail(composition, positions, slots), *_past(composition, positions, slots)]
    tensors = iter(upload(arrays, device))
    settings = composition.settings
    # No greedy row looks at its key; anything of the right device will do.
    keys_S2 = settings.top_k_S if composition.all_greedy else next(tensors)
    return DrawPlan(
        composition=composition,
        sampling=SamplingTensors(
            *settings, key_S2=keys_S2, all_greedy=composition.all_greedy, any_filter=composition.any_filter
        ),
        bans=Entries(next(tensors), next(tensors)) if banned else None,
        tail=Tail(next(tensors), next(tensors)) if composition.words else None,
        past=Past(next(tensors), next(tensors)) if composition.penalties else None,
    )


def _bias(slot_ids: IntArray, slots: SlotTable, device: torch.device) -> Bias:
    rows, tokens, values = [], [], []
    for row, slot in enumerate(slot_ids.tolist()):
        for token, value in slots.settings(slot).logit_bias.items():
            rows.append(row)
            tokens.append(token)
            values.append(value)
    row_N, token_N = upload([np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64)], device)
    (value_N,) = upload([np.array(values, dtype=np.float32)], device)
    return Bias(Entries(row_N, token_N), value_N)


def _words(slot_ids: IntArray, slots: SlotTable, device: torch.device) -> Words:
    found = [(row, word) for row, slot in enumerate(slot_ids.tolist()) for word in slots.settings(slot).bad_words]
    num_before = max(len(word) for _, word in found) - 1
    prefix = np.full((len(found), num_before), -1, dtype=np.int64)
    for i, (_, word) in enumerate(found):
        if len(word) > 1:
            prefix[i, num_before - len(word) + 1 :] = word[:-1]
    rows = np.array([row for row, _ in found], dtype=np.int64)
    last = np.array([word[-1] for _, word in found], dtype=np.int64)
    return Words(BadWords(*upload([rows, last, prefix], device)), rows, num_before)


def _bans(slot_ids: IntArray, slots: SlotTable, vocabulary: Vocabulary) -> Bans:
    rows, tokens, until = [], [], []
    for row, slot in enumerate(slot_ids.tolist()):
        params = slots.settings(slot)
        if not params.min_tokens:
            continue
        ids = {*params.stop_token_ids, *(() if params.ignore_eos else vocabulary.eos_token_ids)}
        # A stop id the model has no logit for stops nothing, and must not reach an index.
        ids = {token for token in ids if 0 <= token < vocabulary.size}
        rows += [row] * len(ids)
        tokens += sorted(ids)
        until += [int(slots.prompt_len[slot]) + params.min_tokens] * len(ids)
    return Bans(np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64), np.array(until, dtype=np.int64))


def _penalties(
    options: IntArray, columns: list[NDArray[np.float32]], prompt_len: IntArray, device: torch.device
) -> Penalties:
    rows = np.flatnonzero(options & (Option.REPETITION | Option.COUNTS))
    union = Option(int(np.bitwise_or.reduce(options)))
    row_P, prompt_len_P, *factors = upload([rows, prompt_len[rows], *(column[rows] for column in columns)], device)
    is_every_row = len(rows) == len(options)
    return Penalties(
        PenaltyRows(None if is_every_row else row_P, prompt_len_P, *factors),
        PenaltyStages(Option.REPETITION in union, Option.COUNTS in union),
        rows,
    )


def _logprobs(slot_ids: IntArray, slots: SlotTable, device: torch.device) -> LogprobRows:
    asked = [slots.settings(slot).logprobs for slot in slot_ids.tolist()]
    rows = [row for row, count in enumerate(asked) if count is not None]
    counts = [count for count in asked if count is not None]
    (row_N,) = upload([np.array(rows, dtype=np.int64)], device)
    return LogprobRows(None if len(rows) == len(asked) else row_N, rows, counts)


def _active_bans(bans: Bans | None, positions: IntArray) -> list[IntArray]:
    if bans is None:
        return []
    active = positions[bans.rows] < bans.until
    return [bans.rows[active], bans.tokens[active]] if active.any() else []


def _tail(composition: Composition, positions: IntArray, slots: SlotTable) -> list[NDArray[Any]]:
    words = composition.words
    if words is None:
        return []
    places = positions[words.rows][:, None] + np.arange(-words.num_before, 0, dtype=np.int64)
    exists = places >= 0
    index = slots.history.flat_index(composition.slots[words.rows][:, None], np.maximum(places, 0))
    return [index, exists]


def _past(composition: Composition, positions: IntArray, slots: SlotTable) -> list[NDArray[Any]]:
    penalties = composition.penalties
    if penalties is None:
        return []
    lengths = positions[penalties.rows]
    return [slots.history.page_rows(composition.slots[penalties.rows], lengths), lengths]
