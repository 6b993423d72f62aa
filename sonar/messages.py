"""Messages between a head and the lead of a replica, and from a lead to every rank of its replica.

Frozen tagged msgspec structs of ids, ints, strings and bytes; one closed union a direction; encoded with MessagePack.
No pickle, no callable. Torch-free. The links between head and agent are in `cluster.messages`.

Rules: each message carries the replica's incarnation and a receiver drops (and counts) a stale one; each request ends
in exactly one terminal `TokenEvent` (finish is not None); token events carry the number of the first token they bring,
so that a gap or a repeat is seen.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from sonar.peer_messages import PeerMessage
from sonar.sampling_params import SamplingParams

RequestId = str


class FinishReason(Enum):
    """Why a request ended. STOP: eos or a stop id. LENGTH: max_tokens or the context's end."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# --- head -> lead ---------------------------------------------------------------------------------------------------


class KVSource(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A replica that has, or is to compute, the KV blocks of a prompt.

    Attributes:
        replica_id, incarnation: it.
        least_tokens: not asked when fewer prompt tokens than this are missing at the replica that gets the request.
        cached_tokens: so many are thought to be cached there, and no more are asked for; 0: all of the prompt is, and
            computed if need be.
    """

    replica_id: str
    incarnation: int
    least_tokens: int = 1
    cached_tokens: int = 0


class Submit(_Message, frozen=True, kw_only=True):
    """Head -> lead: compute a request. Answered by `TokenEvent`s, the last of which has `finish`.

    Attributes:
        emitted_token_ids: tokens already sent to the client by an earlier incarnation; the engine goes on after them.
        priority: smaller is sooner; equal ones by arrival.
        cache_salt: requests share cached prefixes only under an equal salt.
        sampling: has a seed; n is 1 (the API splits n > 1 into requests).
        kv_source: where to get the prompt's KV blocks, rather than compute them; whatever goes wrong with it, they are
            computed after all.
    """

    incarnation: int
    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    emitted_token_ids: list[int] = []
    priority: int = 0
    cache_salt: str = ""
    kv_source: KVSource | None = None


class Abort(_Message, frozen=True, kw_only=True):
    """Head -> lead: end a request now, all blocks returned. Answered by a terminal event; unknown ids are ignored.

    `finish` is what that event will say: STOP when the API found a stop string."""

    incarnation: int
    request_id: RequestId
    finish: FinishReason = FinishReason.ABORT


class Drain(_Message, frozen=True, kw_only=True):
    """Head -> lead: take no new request, finish the open ones, answer `Drained`, then exit 0."""

    incarnation: int


class Ping(_Message, frozen=True, kw_only=True):
    """Head -> lead: answered at once by `Pong` with the same number, from the engine loop itself."""

    incarnation: int
    number: int


class FromPeer(_Message, frozen=True, kw_only=True):
    """Head -> lead: what another replica's present incarnation says to this one; see `sonar.peer_messages`."""

    incarnation: int
    replica_id: str
    peer_incarnation: int
    message: PeerMessage


class PeerGone(_Message, frozen=True, kw_only=True):
    """Head -> lead: that incarnation of a replica serves no more. What it holds cannot be had, and what it asked for is
    of no use to anyone.

    `has_ended`: its processes are known to have ended; until then a read from it that was given up may go on."""

    incarnation: int
    replica_id: str
    peer_incarnation: int
    has_ended: bool


class TakeRoll(_Message, frozen=True, kw_only=True):
    """Head -> lead: the head, or the connection, is new: what is there? Answered by `Roll` once the lead serves."""

    incarnation: int


class Resume(_Message, frozen=True, kw_only=True):
    """Head -> lead: tell a request's tokens again, from number `first` on. Answered by one `Tokens` with a single event
    of all there are, terminal if the request has ended; others follow as they come. An id that is not held (any more)
    is ignored."""

    incarnation: int
    request_id: RequestId
    first: int


HeadToLead = Submit | Abort | Drain | Ping | TakeRoll | Resume | FromPeer | PeerGone


# --- lead -> head ---------------------------------------------------------------------------------------------------


class LeadHello(_Message, frozen=True, kw_only=True):
    """Lead -> head: first message on a connection; no answer. Sent again after a reconnect."""

    incarnation: int
    replica_id: str
    pid: int


class LoadProgress(_Message, frozen=True, kw_only=True):
    """Lead -> head: a phase of start-up; for people and for deadlines ("no progress"), not for decisions."""

    incarnation: int
    phase: str
    done: int
    total: int


class LeadReady(_Message, frozen=True, kw_only=True):
    """Lead -> head: the engine takes requests. Figures are of one replica. notices: what its owner has to be told."""

    incarnation: int
    replica_id: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_requests: int
    weights_bytes: int
    ops_backend: str
    notices: tuple[str, ...] = ()


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probability of the model's own distribution (before penalties and filters); rank 1 = most likely."""

    token_id: int
    logprob: float
    rank: int


class KVFetchRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What became of a request's `KVSource`. Times are seconds since the request arrived at its replica.

    Attributes:
        tokens: whose blocks came from there. bytes_read: of those.
        asked_s: when it was asked. first_s: when the first blocks could be read there. done_s: when all were here, or
            it was given up.
        error: why not all came; the rest was computed here.
    """

    replica_id: str
    incarnation: int
    tokens: int
    bytes_read: int
    asked_s: float
    first_s: float
    done_s: float
    error: str = ""


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one step did for one request.

    Attributes:
        first: number of `token_ids[0]` in the request's output, counted from 0 over all incarnations.
        token_ids: new tokens, maybe none in a terminal event.
        logprobs: per new token, the drawn token first, then the alternatives asked for; empty when not asked.
        prompt_logprobs: per prompt token from the second on, likewise; once, with the first event.
        num_cached_tokens: prompt tokens that came from the prefix cache; in the first event, -1 elsewhere.
        stop_token_id: the id that ended it, when finish is STOP by id.
        error: text for the client when finish is ERROR. error_code: its `UserError.code` when the request was at fault.
        kv_fetch: of its blocks from another replica; in the first event, if any were asked for.
    """

    request_id: RequestId
    first: int
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[list[Logprob]] = []
    prompt_logprobs: list[list[Logprob]] = []
    num_cached_tokens: int = -1
    stop_token_id: int | None = None
    error: str = ""
    error_code: str = ""
    kv_fetch: KVFetchRecord | None = None


class Tokens(_Message, frozen=True, kw_only=True):
    """Lead -> head: the events of one step, numbered per incarnation from 0 without a gap."""

    incarnation: int
    sequence: int
    events: list[TokenEvent]


class HeldRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request whose tokens a lead can tell again.

    Attributes:
        first: number of the first token it holds; earlier ones came with `Submit`. end: of the last one, plus 1.
        is_finished: it has ended; its events are kept for a while.
    """

    request_id: RequestId
    first: int
    end: int
    is_finished: bool


class Roll(_Message, frozen=True, kw_only=True):
    """Lead -> head: answer to `TakeRoll`: all that it has open, or has ended a short time ago.

    Attributes:
        next_sequence: that the next `Tokens` will have.
    """

    incarnation: int
    ready: LeadReady
    next_sequence: int
    requests: list[HeldRequest] = []


class BlockStored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A full block entered the prefix cache. Hashes: `sonar.block_hash`."""

    block_hash: bytes
    parent_hash: bytes


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A cached block was evicted."""

    block_hash: bytes


KVEvent = BlockStored | BlockRemoved


class KVEvents(_Message, frozen=True, kw_only=True):
    """Lead -> head: changes of the prefix cache, numbered per incarnation.

    A gap makes the router forget this replica's blocks."""

    incarnation: int
    sequence: int
    events: list[KVEvent]


class PairStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a replica got from another one, over all incarnations of that; absolute values.

    Attributes:
        fetches: ended, `failed` among them. bytes_read: of blocks that came whole.
        recomputed_tokens: that were to come from there and were computed here.
        read_seconds: sum over reads. early_bytes: read while the other side was still computing.
        open_fetches: of now.
    """

    replica_id: str
    fetches: int = 0
    failed: int = 0
    bytes_read: int = 0
    early_bytes: int = 0
    recomputed_tokens: int = 0
    read_seconds: float = 0.0
    open_fetches: int = 0


class LeadStats(_Message, frozen=True, kw_only=True):
    """Lead -> head: once a second and after each change from idle; absolute values since the incarnation began.

    `steps` is the progress by which a hung engine is told from an idle one. `expert_imbalance`: rows of the busiest
    rank by the ranks' mean, in the layer where that is largest; 0 when experts are not shared out or not measured."""

    incarnation: int
    steps: int
    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_in_use: int
    blocks_in_transit: int
    blocks_total: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    step_seconds: float
    expert_imbalance: float = 0.0
    experts_moved: int = 0
    blocks_quarantined: int = 0
    pairs: tuple[PairStats, ...] = ()


class StepAhead(_Message, frozen=True, kw_only=True):
    """Lead -> head: the step that begins is expected to be a long one, so that silence for its time is no hang. Holds
    until the next `LeadStats`; short steps are not announced.

    Attributes:
        expected_s: at most, by what earlier steps took.
    """

    incarnation: int
    step: int
    num_tokens: int
    expected_s: float


class Fault(_Message, frozen=True, kw_only=True):
    """Lead or other rank -> head: this incarnation is over; the process exits after sending.

    `traceback` is for the log, never for a client. is_user_error: the same start would meet it again, and `error` is a
    sentence for whoever asked for it."""

    incarnation: int
    rank: int
    step: int
    error: str
    traceback: str
    is_user_error: bool = False


class Draining(_Message, frozen=True, kw_only=True):
    """Lead -> head: the process was told to end (SIGTERM): no new request. Open ones go on; `Drained` follows."""

    incarnation: int


class Drained(_Message, frozen=True, kw_only=True):
    """Lead -> head: answer to `Drain`, and the end of what `Draining` began; the process exits with 0."""

    incarnation: int


class Pong(_Message, frozen=True, kw_only=True):
    """Lead -> head: answer to `Ping`."""

    incarnation: int
    number: int


class ToPeer(_Message, frozen=True, kw_only=True):
    """Lead -> head: to be handed to that incarnation of another replica as `FromPeer`; answered by `PeerGone` if it
    does not serve."""

    incarnation: int
    replica_id: str
    peer_incarnation: int
    message: PeerMessage


LeadToHead = (
    LeadHello
    | LoadProgress
    | LeadReady
    | Roll
    | Tokens
    | KVEvents
    | LeadStats
    | StepAhead
    | Fault
    | Draining
    | Drained
    | Pong
    | ToPeer
)


# --- rank -> head: rendezvous of the ranks of an incarnation ----------------------------------------------------------


class StoreWrite(_Message, frozen=True, kw_only=True):
    """Rank -> head: sets a key; answered by `StoreReply` with the value that it then has.

    `expected`: set it only if its value is this one (empty: or if there is none); None sets it in any case."""

    incarnation: int
    number: int
    key: str
    value: bytes
    expected: bytes | None = None


class StoreAdd(_Message, frozen=True, kw_only=True):
    """Rank -> head: adds to the number that a key holds (0 when absent); answered by `StoreReply` with `count`."""

    incarnation: int
    number: int
    key: str
    amount: int


class StoreRead(_Message, frozen=True, kw_only=True):
    """Rank -> head: the values of keys; answered by `StoreReply` once all exist, or after `timeout_s` with those that
    are `missing`."""

    incarnation: int
    number: int
    keys: list[str]
    timeout_s: float = 0.0


class StoreDelete(_Message, frozen=True, kw_only=True):
    """Rank -> head: forgets a key; answered by `StoreReply`, `count` 1 if there was one."""

    incarnation: int
    number: int
    key: str


class StoreSize(_Message, frozen=True, kw_only=True):
    """Rank -> head: how many keys there are; answered by `StoreReply` with `count`."""

    incarnation: int
    number: int


class StoreReply(_Message, frozen=True, kw_only=True):
    """Head -> rank: answer to the request of that number. `values` is parallel to the keys asked for, unless some are
    `missing`."""

    number: int
    values: list[bytes] = []
    missing: list[str] = []
    count: int = 0


StoreRequest = StoreWrite | StoreAdd | StoreRead | StoreDelete | StoreSize
RankToHead = StoreWrite | StoreAdd | StoreRead | StoreDelete | StoreSize | Fault


# --- lead -> every rank of its replica --------------------------------------------------------------------------------


class AdmittedRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request enters a slot (again, after a preemption); the rank forgets what the slot held.

    Attributes:
        slot: in [0, max_num_requests); free until now.
        token_ids: prompt and emitted tokens, all that is known.
        prompt_len: how many of them are prompt (penalties tell them apart).
        sampling: with its seed.
    """

    slot: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams


class NewBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to a slot's table of one cache group; `start` is the index of the first in the table."""

    slot: int
    group: int
    start: int
    block_ids: list[int]


class StepBatch(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Lead -> every rank (the lead's own too): one step's work, as parallel arrays over the scheduled requests.

    Request i computes the `lengths[i]` tokens at positions starts[i] .. starts[i]+lengths[i]-1 of slot slots[i]. A
    token that is not known yet (the previous step draws it while this one is scheduled) is the slot's last drawn token:
    each rank keeps the drawn tokens of its slots, so the message carries none. When samples[i] is true the logits of
    the last of these positions are drawn from, for position starts[i]+lengths[i].

    Order: requests with lengths[i] == 1 first. Within a step, `released` applies first, then `admitted`, then
    `new_blocks`, then the computation. No other message changes a slot.

    `copies`: (group, source block, destination block), done before the computation.
    `others`: this step of the further data-parallel groups, in order; within the lead alone (`GroupBatches` travels).
    """

    incarnation: int
    step: int
    slots: list[int]
    starts: list[int]
    lengths: list[int]
    samples: list[bool]
    admitted: list[AdmittedRequest] = []
    new_blocks: list[NewBlocks] = []
    released: list[int] = []
    copies: list[tuple[int, int, int]] = []
    others: list[StepBatch] = []


class GroupBatches(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Lead -> every other rank, of a replica with data-parallel groups: one step's batches, an encoded `StepBatch` a
    group, of which each rank decodes its own."""

    incarnation: int
    step: int
    batches: list[msgspec.Raw]


class StepResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Rank -> lead loop: what a step drew, parallel to the requests of `StepBatch` whose `samples` is true.

    `logprobs[i]` is empty for requests that did not ask. `prompt_logprobs` maps a slot to the rows of this chunk's
    positions (the entry for position p describes the token at p+1).
    `others`: results of the further data-parallel groups, in order; within the lead alone."""

    step: int
    token_ids: list[int]
    logprobs: list[list[Logprob]] = []
    prompt_logprobs: dict[int, list[list[Logprob]]] = {}
    others: list[StepResult] = []


class EndOfSteps(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Lead -> every other rank: no further step comes; each ends its process with 0."""

    incarnation: int


LeadToRank = StepBatch | GroupBatches | EndOfSteps
