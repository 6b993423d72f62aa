"""What a request adds to, bans from or penalizes in its logits before a token is drawn: tensor functions, no state.

Each changes rows of logits in place, without a host synchronization, and touches no row that did not ask. A row's
result depends on that row alone. Called by the sampler, which also fixes the order.

Legend: S rows of the logits, P rows with penalties, V vocabulary, N single entries, W banned words, M tokens before the
last of the longest banned word, L history tokens gathered a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BAN = float("-inf")


class Entries(NamedTuple):
    """Single logits: row_N and token_N, int64; no pair twice."""

    row_N: Tensor
    token_N: Tensor


class BadWords(NamedTuple):
    """Banned sequences.

    Attributes:
        row_W: row each belongs to. last_W: its last token.
        prefix_WM: the tokens before that, right-aligned; -1 fits anything.
    """

    row_W: Tensor
    last_W: Tensor
    prefix_WM: Tensor


class PenaltyRows(NamedTuple):
    """Rows with penalties and their factors, float32 (P,), and prompt lengths, int64 (P,).

    Attributes:
        row_P: None when they are all rows, in order.
    """

    row_P: Tensor | None
    prompt_len_P: Tensor
    repetition_P: Tensor
    presence_P: Tensor
    frequency_P: Tensor


class PenaltyStages(NamedTuple):
    """Which penalties any row of a batch uses."""

    has_repetition: bool
    has_counts: bool


def add_bias(logits_SV: Tensor, entries: Entries, value_N: Tensor) -> None:
    """Adds value_N to single logits."""
    logits_SV.index_put_((entries.row_N, entries.token_N), value_N, accumulate=True)


def ban(logits_SV: Tensor, entries: Entries) -> None:
    """Sets single logits to -inf."""
    value = torch.full((), BAN, dtype=logits_SV.dtype, device=logits_SV.device)
    logits_SV.index_put_((entries.row_N, entries.token_N), value)


def ban_bad_words(logits_SV: Tensor, words: BadWords, tail_WM: Tensor) -> None:
    """Bans the last token of each word whose other tokens are the latest of its row.

    Args:
        tail_WM: the latest M tokens of each word's row, newest last; -2 where the row is shorter.
    """
    fits_W = ((words.prefix_WM == tail_WM) | (words.prefix_WM == -1)).all(dim=1)
    # Added, not assigned: two words of a row may end in the same token while one of them alone fits.
    value_W = torch.zeros(fits_W.shape, dtype=logits_SV.dtype, device=logits_SV.device).masked_fill_(fits_W, BAN)
    logits_SV.index_put_((words.row_W, words.last_W), value_W, accumulate=True)


def penalize(logits_SV: Tensor, rows: PenaltyRows, tokens_PL: Tensor, length_P: Tensor, stages: PenaltyStages) -> None:
    """Applies the repetition penalty, then presence and frequency penalties.

    Args:
        tokens_PL: prompt and output of each row; beyond length_P arbitrary valid ids. length_P: int64, at least 1.
    """
    picked_PV = logits_SV if rows.row_P is None else logits_SV.index_select(0, rows.row_P)
    place_L = torch.arange(tokens_PL.shape[1], device=tokens_PL.device)
    known_PL = place_L < length_P[:, None]
    if stages.has_repetition:
        _penalize_repetition(picked_PV, rows, tokens_PL, known_PL)
    if stages.has_counts:
        output_PL = known_PL & (place_L >= rows.prompt_len_P[:, None])
        _penalize_counts(picked_PV, rows, tokens_PL, output_PL)
    if rows.row_P is not None:
        logits_SV.index_copy_(0, rows.row_P, picked_PV)


def _penalize_repetition(picked_PV: Tensor, rows: PenaltyRows, tokens_PL: Tensor, known_PL: Tensor) -> None:
    # Unknown places repeat the row's first token: equal values written twice to one logit are one write.
    tokens_PL = torch.where(known_PL, tokens_PL, tokens_PL[:, :1])
    seen_PL = picked_PV.gather(1, tokens_PL)
    factor_P1 = rows.repetition_P[:, None]
    picked_PV.scatter_(1, tokens_PL, torch.where(seen_PL > 0, seen_PL / factor_P1, seen_PL * factor_P1))


def _penalize_counts(picked_PV: Tensor, rows: PenaltyRows, tokens_PL: Tensor, output_PL: Tensor) -> None:
    # Counts are small integers in float32: exact whatever the order in which a device adds them.
    count_PV = torch.zeros_like(picked_PV).scatter_add_(1, tokens_PL, output_PL.to(picked_PV.dtype))
    picked_PV.sub_(count_PV * rows.frequency_P[:, None])
    picked_PV.sub_((count_PV > 0) * rows.presence_P[:, None])
