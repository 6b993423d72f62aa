"""Every token a slot is known to hold, on the device: what a step reads as input and what penalties look back on.

Prompt and emitted tokens are written when a request is admitted; a drawn token is written where it was drawn, on the
device. So the next step's input is one gather that needs no host round trip, whether or not the host has seen the token
yet. Knows nothing of sampling or of the KV cache. Owned by `SlotTable`.

Memory: tokens live in pages of PAGE tokens, each of one slot; pages are handed out as a request grows and the pool
doubles when it runs dry. A slots x max_model_len table would take 256 MiB for 256 slots of a 128k model on behalf of
requests that are a hundred times shorter.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonar.messages import AdmittedRequest
from sonar.worker.upload import upload

PAGE = 256
_FIRST_PAGES = 64

IntArray = NDArray[np.int64]


class TokenHistory:
    """Owns the tokens of all slots and the pages they lie in.

    Args:
        num_slots: slots of the rank.
        max_model_len: tokens of a request at most; the token drawn at this very position still has a place.
        device: of the pool.
    """

    def __init__(self, num_slots: int, max_model_len: int, device: torch.device) -> None:
        self._device = device
        self._max_pages = max_model_len // PAGE + 1
        self._pages = np.zeros((num_slots, self._max_pages), dtype=np.int64)
        self._num_pages = np.zeros(num_slots, dtype=np.int64)
        # Zeros, and stale tokens later: whatever lies beyond a slot's length is a valid token id, so that a masked
        # gather never indexes out of the vocabulary.
        self._pool = torch.zeros((_FIRST_PAGES, PAGE), dtype=torch.int64, device=device)
        self._free = list(range(_FIRST_PAGES - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self._pool.shape[0]

    @property
    def num_free_pages(self) -> int:
        """Pages no slot holds."""
        return len(self._free)

    def release(self, slot: int) -> None:
        """Gives the slot's pages back; harmless for an empty slot."""
        count = int(self._num_pages[slot])
        self._free.extend(self._pages[slot, :count].tolist())
        self._num_pages[slot] = 0

    def admit(self, requests: list[AdmittedRequest]) -> None:
        """Writes the known tokens of each request into its slot, in place of what it held."""
        if not requests:
            return
        indices, values = [], []
        for request in requests:
            self.release(request.slot)
            tokens = np.array(request.token_ids, dtype=np.int64)
            self._grow(request.slot, len(tokens))
            positions = np.arange(len(tokens), dtype=np.int64)
            indices.append(self.flat_index(np.full(len(tokens), request.slot, dtype=np.int64), positions))
            values.append(tokens)
        index, value = upload([np.concatenate(indices), np.concatenate(values)], self._device)
        self._pool.view(-1).index_copy_(0, index, value)

    def reserve(self, slots: IntArray, positions: IntArray) -> None:
        """Makes sure each slot has a page for a token at its position."""
        short = np.flatnonzero(self._num_pages[slots] * PAGE <= positions)
        for i in short.tolist():
            self._grow(int(slots[i]), int(positions[i]) + 1)

    def flat_index(self, slots: IntArray, positions: IntArray) -> IntArray:
        """Where each (slot, position) lies in the pool; the place must have been admitted or reserved."""
        # One flat look-up: about half the cost of a two-array index, and this runs every step.
        page_of = self._pages.reshape(-1)[slots * self._max_pages + positions // PAGE]
        index: IntArray = page_of * PAGE + positions % PAGE
        return index

    def read(self, index_T: Tensor) -> Tensor:
        """Tokens at places that `flat_index` gave, int64 (T,)."""
        return self._pool.view(-1).index_select(0, index_T)

    def write(self, index_S: Tensor, token_ids_S: Tensor) -> None:
        """Stores drawn tokens at places that `flat_index` gave."""
        self._pool.view(-1).index_copy_(0, index_S, token_ids_S)

    def page_rows(self, slots: IntArray, lengths: IntArray) -> IntArray:
        """Page numbers (R, pages of the longest) that hold the first `lengths` tokens of each slot, for `rows`."""
        width = int((lengths.max() + PAGE - 1) // PAGE)
        rows: IntArray = self._pages[slots, :width]
        return rows

    def rows(self, pages_RW: Tensor) -> Tensor:
        """Tokens of whole pages, (R, W * PAGE); what lies beyond a slot's length is arbitrary but a valid id."""
        num_rows, width = pages_RW.shape
        return self._pool.index_select(0, pages_RW.reshape(-1)).view(num_rows, width * PAGE)

    def _grow(self, slot: int, num_tokens: int) -> None:
        needed = -(-num_tokens // PAGE)
        have = int(self._num_pages[slot])
        assert needed <= self._max_pages, f"slot {slot} needs {needed} pages of {self._max_pages}"
        while needed - have > len(self._free):
            self._double_pool()
        for i in range(have, needed):
            self._pages[slot, i] = self._free.pop()
        self._num_pages[slot] = max(have, needed)

    def _double_pool(self) -> None:
        old = self.num_pages
        pool = torch.zeros((2 * old, PAGE), dtype=torch.int64, device=self._device)
        pool[:old] = self._pool
        self._pool = pool
        self._free.extend(range(2 * old - 1, old - 1, -1))
