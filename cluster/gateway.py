"""The contract between the HTTP API and the part of the head that owns requests.

The API validates, tokenizes and detokenizes; the gateway journals a request, routes it to a replica, moves it when that
replica dies, and hands back its token events in order, each token once. Knows nothing of HTTP or text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from sonar.messages import FinishReason, TokenEvent
from sonar.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerateRequest:
    """One sequence to generate: `sampling.n` is 1 and `sampling.seed` is set.

    session: requests of one session prefer one replica, whose cache knows them; empty = none.
    emitted_token_ids: of a request that an earlier head accepted, what it has drawn; the output goes on after them.
    None for a new request."""

    request_id: str
    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    arrival_s: float = 0.0
    session: str = ""
    emitted_token_ids: list[int] | None = None


@dataclass(frozen=True)
class ServedModel:
    """A model the API offers. path: folder or file its tokenizer is read from. ready: a replica takes requests.
    is_recovering: none does, but one that did is being started again, and requests wait for it.
    note: why none does, where the head knows."""

    name: str
    path: str
    max_model_len: int
    created_unix_s: int
    ready: bool
    eos_token_ids: tuple[int, ...] = field(default=())
    is_recovering: bool = False
    note: str = ""


class Gateway(Protocol):
    """Owner of open requests."""

    def models(self) -> list[ServedModel]:
        """What is deployed now."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Token events of the request; the last one has `finish`. Closing the iterator early aborts the request.

        Raises:
            CapacityError: the queue is full (before the first event).
        """
        ...

    def abort(self, request_id: str, finish: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request; its iterator yields the terminal event with `finish` (STOP when a stop string was found)."""
        ...

    async def probe(self, model: str, timeout_s: float) -> bool:
        """Whether one token came back through the router within the time: the truth behind `/ready`."""
        ...
