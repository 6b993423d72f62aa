"""Ranks as threads of one process, for tests of models without process groups: collectives by a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from sonar.distributed.shard_map import split

TIMEOUT_S = 60.0


class Board:
    """Where the ranks of one group lay down what the others read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.places: list[Any] = [None] * size


class ThreadRank:
    """One rank's `TensorParallel`."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank
        self.num_sums = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._board.size

    def vocabulary(self, vocab_size: int) -> tuple[int, int]:
        return split(vocab_size, self.size, self._rank)

    def sum(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        first, *rest = self._exchange(x)
        total = first.clone()
        for part in rest:
            total += part
        return total

    def gather_columns(self, x_SV: Tensor, vocab_size: int) -> Tensor | None:
        whole = torch.cat(self._exchange(x_SV), dim=1)
        assert whole.shape[1] == vocab_size
        return whole if self._rank == 0 else None

    def gather_pairs(self, pairs_SC: Tensor) -> Tensor:
        return torch.stack(self._exchange(pairs_SC))

    def broadcast(self, x: Tensor) -> Tensor:
        return self._exchange(x)[0]

    def _exchange(self, x: Tensor) -> list[Tensor]:
        board = self._board
        board.places[self._rank] = x.clone()
        board.barrier.wait(TIMEOUT_S)
        seen = list(board.places)
        board.barrier.wait(TIMEOUT_S)
        return seen


def run_ranks(size: int, function: Callable[[ThreadRank], Any]) -> list[Any]:
    """What the function returns on each of `size` ranks; raises what one raises."""
    board = Board(size)

    def run(rank: int) -> Any:
        try:
            return function(ThreadRank(board, rank))
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]
