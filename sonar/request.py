"""A request inside the engine: everything that is known of it, in one place.

Knows nothing of other requests, of steps or of pools. Owned by the scheduler, which alone changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from sonar.kvcache.fetches import BlockFetch
from sonar.kvcache.request_blocks import RequestBlocks
from sonar.messages import AdmittedRequest, FinishReason, KVFetchRecord, KVSource, Logprob, RequestId, TokenEvent
from sonar.sampling_params import SamplingParams

NO_SLOT = -1


class RequestStatus(Enum):
    """WAITING: holds no slot and no block. FETCHING: its prompt's blocks are on their way from another replica.
    RUNNING: holds slot and blocks. HOLDING: all is computed, its blocks are kept for another replica. FINISHED: holds
    nothing, will say nothing more."""

    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    HOLDING = "holding"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What does not change.

    Attributes:
        prompt_len: tokens before the first output token.
        max_total: tokens, prompt and output, at which the request ends: by max_tokens or the context's end.
        stop_token_ids: end-of-sequence ids, unless ignored, and the request's own.
        order: number of its arrival.
        arrival_s: monotonic time of its arrival.
        is_export: asked for by another replica: its last token is not computed, no token is drawn, and its blocks are
            kept until that replica has read them.
    """

    request_id: RequestId
    prompt_len: int
    max_total: int
    stop_token_ids: frozenset[int]
    sampling: SamplingParams
    order: int
    priority: int = 0
    arrival_s: float = 0.0
    is_export: bool = False


@dataclass(slots=True)
class FirstEvent:
    """What only the request's first event carries, collected until it goes out.

    Attributes:
        num_cached_tokens: prompt tokens found in the prefix cache; -1 until the request is admitted.
        wants_prompt_logprobs: whether the rows below are to be collected, in which case every prompt token must be
            computed and the prefix cache is not read.
        kv_fetch: what came from another replica.
        prompt_logprobs: per prompt token from the second on.
    """

    wants_prompt_logprobs: bool
    num_cached_tokens: int = -1
    kv_fetch: KVFetchRecord | None = None
    prompt_logprobs: list[list[Logprob]] = field(default_factory=list)


@dataclass(slots=True)
class PeerPart:
    """What a request has to do with other replicas.

    Attributes:
        source: where its prompt's blocks are to come from; None once that was tried. cache_salt: see `Submit`.
        fetch: the blocks on their way, while FETCHING.
        num_cached: tokens found in the prefix cache at its last admission.
        num_fresh: prompt tokens that another replica computed for it: they are in the cache, and were not before.
        num_ready: of an export, tokens whose blocks are computed for certain.
    """

    source: KVSource | None = None
    cache_salt: str = ""
    fetch: BlockFetch | None = None
    num_cached: int = 0
    num_fresh: int = 0
    num_ready: int = 0


class Request:
    """The one owner of a request's state.

    Attributes:
        token_ids: known tokens: prompt, then output.
        num_total: known tokens and those that steps under way will draw.
        num_computed: tokens whose keys and values are computed by the steps scheduled so far.
        slot: its seat in the workers, NO_SLOT unless RUNNING.
        blocks: what it holds of the KV cache.
        first_event: None once the first event is out.
        is_preempted: it has had blocks and lost them.
        peers: what it has to do with other replicas.
    """

    __slots__ = (
        "blocks",
        "first_event",
        "is_preempted",
        "num_computed",
        "num_total",
        "peers",
        "slot",
        "spec",
        "status",
        "token_ids",
    )

    def __init__(self, spec: RequestSpec, token_ids: list[int], blocks: RequestBlocks) -> None:
        is_resumed = len(token_ids) > spec.prompt_len
        self.spec = spec
        self.token_ids = token_ids
        self.num_total = len(token_ids)
        self.num_computed = 0
        self.slot = NO_SLOT
        self.status = RequestStatus.WAITING
        self.blocks = blocks
        # An earlier incarnation has sent the prompt's log-probabilities with the first token.
        self.first_event: FirstEvent | None = FirstEvent(spec.sampling.prompt_logprobs is not None and not is_resumed)
        self.is_preempted = False
        self.peers = PeerPart()

    @property
    def compute_end(self) -> int:
        """How many of its known tokens are to be computed."""
        return self.num_total - self.spec.is_export

    @property
    def rank(self) -> tuple[int, int]:
        """Order among running requests: the greatest is the first to lose its blocks."""
        return self.spec.priority, self.spec.order

    @property
    def queue_rank(self) -> tuple[int, bool, int]:
        """Order among waiting requests: by priority, preempted ones first, then by arrival."""
        return self.spec.priority, not self.is_preempted, self.spec.order

    @property
    def num_output(self) -> int:
        """Known output tokens, those of earlier incarnations included."""
        return len(self.token_ids) - self.spec.prompt_len

    @property
    def reads_prefix_cache(self) -> bool:
        """False while the log-probabilities of its prompt are still to be computed."""
        return self.first_event is None or not self.first_event.wants_prompt_logprobs

    def admitted(self) -> AdmittedRequest:
        """What the ranks are told when the request takes its slot."""
        sampling = self.spec.sampling
        if sampling.prompt_logprobs is not None and self.reads_prefix_cache:
            # They are sent already: the ranks need not compute them again.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return AdmittedRequest(
            slot=self.slot, token_ids=self.token_ids[:], prompt_len=self.spec.prompt_len, sampling=sampling
        )

    def preempt(self) -> None:
        """Back to WAITING with its known tokens; what steps under way draw for it is dropped and drawn again."""
        self.status = RequestStatus.WAITING
        self.slot = NO_SLOT
        self.is_preempted = True
        self.num_computed = 0
        self.num_total = len(self.token_ids)
        if self.first_event is not None:
            self.first_event.prompt_logprobs = []

    def finish_at(self, token_id: int) -> FinishReason | None:
        """Whether the last known token, `token_id`, ends the request.

        A stop id counts only when `min_tokens` tokens were out before it, as the sampler sees it.
        """
        spec = self.spec
        known = len(self.token_ids)
        if token_id in spec.stop_token_ids and known - 1 - spec.prompt_len >= spec.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if known >= spec.max_total else None

    def collect_prompt_logprobs(self, start: int, rows: list[list[Logprob]]) -> None:
        """Keeps the rows of a chunk that began at `start`; the row of the last prompt token describes output."""
        if self.first_event is not None and self.first_event.wants_prompt_logprobs:
            self.first_event.prompt_logprobs.extend(rows[: max(0, self.spec.prompt_len - 1 - start)])

    def event(self, token_id: int, logprobs: list[Logprob], finish: FinishReason | None) -> TokenEvent:
        """The event that reports the last known token. A stop id is among its tokens and counted."""
        head = self._take_first_event()
        return TokenEvent(
            request_id=self.spec.request_id,
            first=len(self.token_ids) - 1 - self.spec.prompt_len,
            token_ids=[token_id],
            finish=finish,
            logprobs=[logprobs] if logprobs else [],
            prompt_logprobs=head.prompt_logprobs if head else [],
            num_cached_tokens=max(0, head.num_cached_tokens) if head else -1,
            stop_token_id=token_id if finish is FinishReason.STOP else None,
            kv_fetch=head.kv_fetch if head else None,
        )

    def terminal_event(self, finish: FinishReason, stop_token_id: int | None = None, error: str = "") -> TokenEvent:
        """The event that ends the request without another token."""
        head = self._take_first_event()
        return TokenEvent(
            request_id=self.spec.request_id,
            first=self.num_output,
            token_ids=[],
            finish=finish,
            num_cached_tokens=max(0, head.num_cached_tokens) if head else -1,
            stop_token_id=stop_token_id,
            error=error,
            kv_fetch=head.kv_fetch if head else None,
        )

    def _take_first_event(self) -> FirstEvent | None:
        head, self.first_event = self.first_event, None
        return head
