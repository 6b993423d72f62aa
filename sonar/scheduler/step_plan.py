"""A step while it is put together, and a step under way.

Knows nothing of why a request is planned. Called by the scheduler.
"""

from __future__ import annotations

from sonar.messages import NewBlocks, StepBatch
from sonar.request import Request, RequestStatus


class StepPlan:
    """Work chosen for the next step; a request that loses its blocks before the plan is done leaves it.

    Args:
        max_tokens: to compute in the step.

    Attributes:
        decodes: requests that compute one token and draw the next.
        chunks: request -> tokens it computes of what is known.
        admitted: those of `chunks` that take their slot in this step.
        grown: requests whose tables may have new entries.
    """

    def __init__(self, max_tokens: int) -> None:
        self.decodes: list[Request] = []
        self.chunks: dict[Request, int] = {}
        self.admitted: list[Request] = []
        self.grown: list[Request] = []
        self._max_tokens = max_tokens
        self._num_chunk_tokens = 0
        self._filling: set[bytes] = set()

    @property
    def budget(self) -> int:
        """Tokens that may still be added."""
        return self._max_tokens - len(self.decodes) - self._num_chunk_tokens

    def add_chunk(self, request: Request, num_tokens: int, block_size: int) -> None:
        """Plans `num_tokens` known tokens of a request, from `num_computed` on."""
        self.chunks[request] = num_tokens
        self._num_chunk_tokens += num_tokens
        start = request.num_computed
        self._filling.update(request.blocks.hashes[start // block_size : -(-(start + num_tokens) // block_size)])

    def drop(self, request: Request) -> None:
        """Takes a request out again; the tokens return to the budget."""
        if request in self.chunks:
            self._num_chunk_tokens -= self.chunks.pop(request)
        elif request in self.decodes:
            self.decodes.remove(request)

    def fills(self, block_hash: bytes) -> bool:
        """Whether this step computes a block of this hash, or goes on with one that a later step completes."""
        return block_hash in self._filling


class RunningStep:
    """A step that has been handed out and whose result is not in yet.

    Attributes:
        sampled: requests it draws a token for, in the order of the result.
        dropped: requests that finished, were aborted or preempted meanwhile: what the step says of them is not wanted.
        prompt_chunks: slot -> request and first position, where rows of prompt log-probabilities will come.
        exported: exports, and how many of their tokens are computed when this step is done.
    """

    __slots__ = ("dropped", "exported", "prompt_chunks", "sampled", "step")

    def __init__(self, step: int, sampled: list[Request], prompt_chunks: dict[int, tuple[Request, int]]) -> None:
        self.step = step
        self.sampled = sampled
        self.dropped: set[Request] = set()
        self.prompt_chunks = prompt_chunks
        self.exported: list[tuple[Request, int]] = []


def make_batch(plan: StepPlan, incarnation: int, step: int, released: list[int]) -> tuple[StepBatch, RunningStep]:
    """The message and the record of a finished plan; `num_computed` of its requests is still that before the step."""
    chunks = sorted(plan.chunks.items(), key=lambda item: item[1] != 1)
    requests = [*plan.decodes, *(request for request, _ in chunks)]
    draws = [r.num_computed + count == len(r.token_ids) for r, count in chunks]
    new_blocks = [
        NewBlocks(request.slot, *new)
        for request in plan.grown
        if request.status is RequestStatus.RUNNING
        for new in request.blocks.take_new()
    ]
    batch = StepBatch(
        incarnation=incarnation,
        step=step,
        slots=[r.slot for r in requests],
        starts=[r.num_computed for r in requests],
        lengths=[1] * len(plan.decodes) + [count for _, count in chunks],
        samples=[True] * len(plan.decodes) + draws,
        admitted=[r.admitted() for r in plan.admitted],
        new_blocks=new_blocks,
        released=released,
    )
    sampled = [*plan.decodes, *(request for (request, _), draw in zip(chunks, draws) if draw)]
    scored = {r.slot: (r, r.num_computed) for r, _ in chunks if not r.reads_prefix_cache}
    return batch, RunningStep(step, sampled, scored)
