"""From pieces to the bytes of an answer: feeds a writer, knows when the last choice has ended.

Shared by answers that live as long as their connection (`answer`) and those that outlive it (`live_answer`). Knows no
sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.api.choice import Choice
from cluster.api.generation import Update
from cluster.api.tokenizers import TokenizerPool
from cluster.api.writers import Writer

# What writing one row of prompt logprobs costs, in characters to tokenize.
_CHARS_PER_LOGPROB_ROW = 20


class BatchWriter:
    """Owner of a writer's progress.

    Args:
        tokenizers: lends its threads for what takes long to write down.

    Attributes:
        num_open: choices that have not ended.
    """

    def __init__(self, choices: Sequence[Choice], writer: Writer, tokenizers: TokenizerPool) -> None:
        self.streams = writer.streams
        self.num_open = len(choices)
        self._writer = writer
        self._tokenizers = tokenizers
        self._has_prompt_logprobs = any(c.request.sampling.prompt_logprobs is not None for c in choices)

    async def write(self, batch: Sequence[Update], *, is_first: bool) -> bytes:
        """The bytes of a batch of pieces, and of the end when it is there.

        In a thread when the batch may bring the logprobs of a long prompt: tens of thousands of entries would hold up
        every other stream."""
        if not self._has_prompt_logprobs:
            return self.write_now(batch)
        num_rows = sum(len(choice.prompt_logprobs) for choice, _ in batch)
        is_large = is_first or any(piece.finish is not None for _, piece in batch)
        chars = num_rows * _CHARS_PER_LOGPROB_ROW if is_large else 0
        return await self._tokenizers.run(chars, lambda: self.write_now(batch))

    def write_now(self, batch: Sequence[Update]) -> bytes:
        """The same, here and now."""
        data = b""
        for choice, piece in batch:
            data += self._writer.update(choice, piece)
            if piece.finish is not None:
                self.num_open -= 1
                if self.num_open == 0:
                    data += self._writer.end()
        return data
