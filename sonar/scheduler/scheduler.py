"""The scheduler of one replica: which requests compute how many tokens in the next step, and what became of them.

Pure: no clock, no socket, no tensor; data and `now` in, a `StepBatch` or `TokenEvent`s out. Knows tokens only as
numbers. Called by the engine loop, which must execute every batch it is given, in order, and hand back the results in
that order.

With overlap, step N + 1 is scheduled while the tokens of step N are unknown: a request that decodes goes on by one
placeholder. What it drew past its end is dropped when the end is seen.

Blocks and slots returned while a step under way uses them may be handed out at once: see `sonar.kvcache.manager`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from sonar.config import SchedulerConfig
from sonar.errors import CapacityError, ProtocolError
from sonar.kvcache.manager import KVCacheManager
from sonar.messages import (
    FinishReason,
    KVEvent,
    LeadStats,
    Logprob,
    RequestId,
    StepBatch,
    StepResult,
    Submit,
    TokenEvent,
)
from sonar.request import Request, RequestStatus
from sonar.scheduler.admission import RequestLimits, make_export_spec, make_spec
from sonar.scheduler.peers import PeerWork
from sonar.scheduler.slots import SlotPool
from sonar.scheduler.step_plan import RunningStep, StepPlan, make_batch
from sonar.scheduler.totals import Totals
from sonar.scheduler.waiting_queue import WaitingQueue

_OVERLAPPED = 2
# Blocks an admission leaves to requests that run already, as a share of each pool: without it a full cache admits a
# request only to preempt it at the next block that one of them needs.
_SPARE_SHARE = 0.01


NOT_A_NUMBER = "the model's output is not a number (NaN): its weights or the compute type's range are at fault"


class Scheduler:
    """Owner of the open requests of a replica.

    Args:
        config: limits of a step and of the queue (its max_model_len is not read: `limits` has the resolved one).
        limits: what the model allows.
        cache: for this scheduler alone.
        incarnation: of the replica, put on every message.
        num_stages: of a pipeline. With more than one, a request decodes in one step under way alone and the requests
            are shared out over as many steps, so that every stage has work.

    Attributes:
        totals: counters since the incarnation began.
        peers: what is fetched from other replicas, and kept for them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        limits: RequestLimits,
        cache: KVCacheManager,
        incarnation: int = 0,
        num_stages: int = 1,
    ) -> None:
        assert config.max_step_tokens > 0, "max_step_tokens is not resolved"
        self._config = config
        self._limits = limits
        self._cache = cache
        self._incarnation = incarnation
        self._num_stages = num_stages
        self._requests: dict[RequestId, Request] = {}
        self._waiting = WaitingQueue(config.max_waiting)
        self._running: list[Request] = []
        self._slots = SlotPool(config.max_num_requests)
        self._under_way: deque[RunningStep] = deque()
        self.peers = PeerWork(cache)
        self.totals = Totals()

    # --- requests in and out ---

    def add(self, submit: Submit, now: float) -> TokenEvent | None:
        """Takes a request into the queue.

        With `emitted_token_ids` it goes on after them: they count for max_tokens and for the numbers of its tokens.

        Args:
            now: monotonic seconds.
        Returns:
            None, or the terminal event when the emitted tokens end the request already (its last message was lost).
        Raises:
            UserError: it can never be computed as asked. CapacityError: it never fits the KV cache, or the queue is
                full (code "queue_full"). Neither leaves a trace here; the caller answers with a terminal event.
            ProtocolError: a request of this id is open; the caller counts and drops this one, for a terminal event
                would end the other.
        """
        if submit.request_id in self._requests:
            raise ProtocolError(f"request {submit.request_id} is submitted twice")
        spec = make_spec(submit, self._limits, self.totals.arrivals, now)
        token_ids = [*submit.prompt_token_ids, *submit.emitted_token_ids]
        request = Request(spec, token_ids, self._cache.new_blocks(submit.cache_salt))
        if self._cache.is_caching and request.reads_prefix_cache:
            request.peers.source, request.peers.cache_salt = submit.kv_source, submit.cache_salt
        if submit.emitted_token_ids:
            finish = request.finish_at(token_ids[-1])
            if finish is not None:
                return request.terminal_event(finish, token_ids[-1] if finish is FinishReason.STOP else None)
        shortage = self._cache.shortage(spec.max_total)
        if shortage:
            raise CapacityError(
                f"the request may grow beyond the KV cache: {shortage}; lower max_tokens or shorten the prompt",
                param="max_tokens",
                code="kv_cache_too_small",
            )
        self._take_in(request)
        return None

    def add_export(self, submit: Submit, now: float) -> Request:
        """Takes in a sequence whose blocks, but for the last token's, another replica is to read. No token is drawn and
        no event comes; `Request.num_ready` tells how far it is, and `abort` ends it.

        Raises:
            UserError, CapacityError, ProtocolError: as `add`.
        """
        if submit.request_id in self._requests:
            raise ProtocolError(f"request {submit.request_id} is submitted twice")
        spec = make_export_spec(submit, self._limits, self.totals.arrivals, now)
        if shortage := self._cache.shortage(spec.max_total):
            raise CapacityError(shortage, code="kv_cache_too_small")
        request = Request(spec, list(submit.prompt_token_ids), self._cache.new_blocks(submit.cache_salt))
        request.first_event = None
        self._take_in(request)
        return request

    def end_fetch(self, request: Request) -> None:
        """Blocks from another replica have come, or will not: the request goes on with what is cached."""
        self.peers.end_fetch(request)
        self.wake()
        request.status = RequestStatus.WAITING
        request.is_preempted = True  # its turn had come
        self._waiting.push_back(request)

    def abort(self, request_id: RequestId, finish: FinishReason = FinishReason.ABORT) -> TokenEvent | None:
        """Ends a request at once, whatever steps under way compute for it; its blocks and slot are free.

        Returns:
            its terminal event, or None for an id that is not open.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request)
        return request.terminal_event(finish)

    # --- steps ---

    def schedule(self, now: float) -> StepBatch | None:
        """Chooses the next step: requests that decode, then chunks of prompts begun, then waiting requests.

        Returns:
            the batch, to be executed after all earlier ones; None when nothing can be computed before a result, a
            new request or (with transfers) a block comes in.
        """
        if len(self._under_way) >= self.max_under_way:
            return None
        plan = StepPlan(self._config.max_step_tokens)
        self._plan_chunks(plan, self._plan_decodes(plan))
        self._plan_waiting(plan, now)
        if not plan.decodes and not plan.chunks:
            counts = self._cache.counts()
            self.peers.is_blocked = not self._under_way
            waits_for_blocks = not self.peers.is_empty or counts.in_transit or counts.quarantined
            is_stuck = self._requests and self.peers.is_blocked and not waits_for_blocks
            assert not is_stuck, f"{len(self._running)} running, {len(self._waiting)} waiting make no step: {counts}"
            return None
        return self._commit(plan)

    def update(self, result: StepResult, now: float) -> list[TokenEvent]:
        """Takes in what the oldest step under way drew; what it says of requests that left meanwhile is dropped.

        Returns:
            an event for each request that got a token, terminal where that token ends it.
        """
        step = self._under_way.popleft()
        assert result.step == step.step, f"result of step {result.step} while {step.step} is the oldest under way"
        assert len(result.token_ids) == len(step.sampled), f"{len(result.token_ids)} tokens for {len(step.sampled)}"
        self.totals.steps += 1
        dropped = step.dropped
        for request, num_tokens in step.exported:
            if request not in dropped:
                request.peers.num_ready = num_tokens
        for slot, rows in result.prompt_logprobs.items():
            request, start = step.prompt_chunks[slot]
            if request not in dropped:
                request.collect_prompt_logprobs(start, rows)
        logprobs = result.logprobs or [[]] * len(step.sampled)
        return [
            self._accept(request, token_id, its_logprobs, now)
            for request, token_id, its_logprobs in zip(step.sampled, result.token_ids, logprobs, strict=True)
            if request not in dropped
        ]

    def join_step(self) -> StepBatch:
        """A step without requests, which other data-parallel groups take; its result comes like any other's."""
        return self._commit(StepPlan(self._config.max_step_tokens))

    def wake(self) -> None:
        """Blocks have become free, or have come: `schedule` may find something to do."""
        self.peers.is_blocked = False

    # --- figures ---

    @property
    def max_under_way(self) -> int:
        """Steps that `schedule` hands out before the first one's result."""
        return self._num_stages if self._num_stages > 1 else _OVERLAPPED if self._config.overlap else 1

    @property
    def can_step(self) -> bool:
        """Whether `schedule` might find something to do without a step under way; not if it has just found nothing."""
        return not self.peers.is_blocked and bool(self._running or len(self._waiting))

    @property
    def num_open(self) -> int:
        """Requests without a terminal event."""
        return len(self._requests)

    @property
    def num_under_way(self) -> int:
        """Steps handed out whose results are not in."""
        return len(self._under_way)

    def stats(self, step_seconds: float) -> LeadStats:
        """The message for the head.

        Args:
            step_seconds: as the engine loop measured it.
        """
        totals, counts = self.totals, self._cache.counts()
        return LeadStats(
            incarnation=self._incarnation,
            steps=totals.steps,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            blocks_in_use=counts.in_use,
            blocks_in_transit=counts.in_transit,
            blocks_total=counts.total,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            preemptions=totals.preemptions,
            step_seconds=step_seconds,
            blocks_quarantined=counts.quarantined,
        )

    def take_kv_events(self) -> list[KVEvent]:
        """Net changes of the prefix cache since the last call, for the head's router."""
        return self._cache.take_events()

    def check(self) -> None:
        """Asserts that no block or slot is lost or owned twice and no request forgotten. O(blocks + requests)."""
        peers = self.peers
        placed = len(self._running) + len(self._waiting) + len(peers.fetching) + len(peers.holding)
        assert len(self._requests) == placed, f"open requests: {self._requests.keys()}"
        assert all(request.status is RequestStatus.RUNNING for request in self._running)
        assert all(request.status is RequestStatus.WAITING for request in self._waiting)
        self._slots.check([request.slot for request in self._running])
        self._cache.check((request.blocks for request in self._requests.values()), peers.fetches.kept())

    # --- planning ---

    def _plan_decodes(self, plan: StepPlan) -> list[Request]:
        """Plans one token of each request that has all its known tokens computed but the last; returns the others."""
        behind = []
        decodes = plan.decodes
        running = tuple(self._running) if self._num_stages == 1 else self._stage_share()
        for request in running:
            total = request.num_total
            if request.status is not RequestStatus.RUNNING:
                continue  # lost its blocks to one before it in this very loop
            if request.num_computed != total - 1:
                behind.append(request)
            elif total < request.spec.max_total and (  # else the token under way is its last
                total <= request.blocks.quiet_end or self._make_room(plan, request, total) == total
            ):
                decodes.append(request)
        return behind

    def _stage_share(self) -> tuple[Request, ...]:
        """Of the running requests those that a step of a pipeline may take: all that are behind, and of the ones that
        decode, none whose token is still to come, and no more than leave some for the other stages."""
        decoding = [r for r in self._running if r.num_computed >= len(r.token_ids) - 1]
        known = [r for r in decoding if r.num_total == len(r.token_ids)]
        share = set(known[: -(-len(decoding) // self._num_stages)])
        return tuple(r for r in self._running if r in share or r.num_computed < len(r.token_ids) - 1)

    def _plan_chunks(self, plan: StepPlan, behind: list[Request]) -> None:
        """Plans what the budget allows of requests whose known tokens are not all computed."""
        for request in behind:
            start, budget = request.num_computed, plan.budget
            if budget <= 0:
                return
            if request.status is RequestStatus.RUNNING:
                end = self._make_room(plan, request, min(start + budget, request.compute_end))
                if end > start:
                    plan.add_chunk(request, end - start, self._cache.block_size)

    def _plan_waiting(self, plan: StepPlan, now: float) -> None:
        """Admits waiting requests while budget, slots and blocks last; the first that does not fit ends it.

        A request whose next missing block is being computed in this step is passed over: in the next one it finds the
        block instead of computing it again. It does not wait for long: what it waits for is computed in this step. The
        same holds for a block on its way from another replica.
        """
        size = self._cache.block_size
        gone = []
        for request in self._waiting:
            if plan.budget <= 0 or not self._slots.num_free:
                break
            hit = 0
            if self._cache.is_caching and request.reads_prefix_cache:
                hit = self._cache.find_prefix(request.blocks, request.token_ids)
                # The last token is always computed, so a block that ends with it could not be used.
                can_use_next = hit < (len(request.token_ids) - 1) // size
                next_hash = request.blocks.hashes[hit] if can_use_next else b""
                if can_use_next and (plan.fills(next_hash) or self.peers.fetches.brings(next_hash)):
                    continue
            if self.peers.wants(request, hit):
                is_taken = self.peers.begin(request, hit, self.totals.batches, _SPARE_SHARE)
            else:
                is_taken = self._admit(plan, request, hit, now)
            if not is_taken:
                break
            gone.append(request)
        for request in gone:
            self._waiting.remove(request)

    def _admit(self, plan: StepPlan, request: Request, hit: int, now: float) -> bool:
        """Seats a waiting request if its blocks suffice, and plans its first chunk."""
        start, total = hit * self._cache.block_size, request.compute_end
        end = min(start + plan.budget, total)
        # Alone it has no one to wait for: it starts with whatever chunk fits.
        is_alone = not self._running
        least = min(start + 1, end) if is_alone else end
        if not self._cache.admit(request.blocks, hit, total, least, 0.0 if is_alone else _SPARE_SHARE):
            return False
        request.num_computed = request.peers.num_cached = start
        if start == total:
            self._hold_cached(request)
            return True
        end = self._cache.grow(request.blocks, start, end)
        request.slot = self._slots.take()
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=_rank)
        plan.add_chunk(request, end - start, self._cache.block_size)
        plan.admitted.append(request)
        plan.grown.append(request)
        self.totals.count_admission(request, start, now)
        return True

    def _hold_cached(self, request: Request) -> None:
        """Keeps the blocks of an export that is cached to its end; steps under way may still be filling them."""
        self.peers.hold(request)
        if self._under_way:
            self._under_way[-1].exported.append((request, request.num_computed))
        else:
            request.peers.num_ready = request.num_computed

    def _make_room(self, plan: StepPlan, request: Request, end: int) -> int:
        """Gets blocks up to `end`, if need be from requests of a greater rank; returns how far there is room.

        A request never gives way to itself: if it is the last, it keeps what it has and stands still until the others
        go on without it or take its blocks. The first one can take all, so some request always makes progress.
        """
        start = request.num_computed
        while True:
            reached = self._cache.grow(request.blocks, start, end)
            if reached > start:
                plan.grown.append(request)
                return reached
            # Not an export: another replica may be reading its blocks.
            victim = next((running for running in reversed(self._running) if not running.spec.is_export), None)
            if victim is None or victim.rank <= request.rank:
                return start
            self._preempt(victim, plan)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        plan.drop(request)
        self._vacate(request)
        request.preempt()
        self._waiting.push_back(request)
        self.totals.preemptions += 1

    def _commit(self, plan: StepPlan) -> StepBatch:
        """Makes the plan final: from here on its tokens count as computed."""
        batch, step = make_batch(plan, self._incarnation, self.totals.batches, self._slots.take_released())
        self.totals.batches += 1
        self._under_way.append(step)
        for request, num_tokens in plan.chunks.items():
            request.num_computed += num_tokens
            if request.spec.is_export:
                step.exported.append((request, request.num_computed))
        for request in plan.decodes:
            request.num_computed += 1
        for request in step.sampled:
            request.num_total += 1
        # Not before: a request admitted to this step must not have found what this step computes.
        for request in (*plan.decodes, *plan.chunks):
            if request.num_computed >= request.blocks.register_at:
                self._cache.register(request.blocks, request.token_ids, request.num_computed)
        for request, num_tokens in step.exported:
            if num_tokens == request.compute_end:
                self._running.remove(request)
                self._slots.give_back(request.slot)
                self.peers.hold(request)
        return batch

    def _take_in(self, request: Request) -> None:
        self._waiting.push(request)
        self._requests[request.spec.request_id] = request
        self.totals.arrivals += 1
        self.wake()

    # --- results ---

    def _accept(self, request: Request, token_id: int, logprobs: list[Logprob], now: float) -> TokenEvent:
        """Adds a drawn token to its request, ends the request if that is its last, and reports it.

        A negative one is none: the worker's word that the row's logits were not numbers."""
        if token_id < 0:
            self._end(request)
            return request.terminal_event(FinishReason.ERROR, error=NOT_A_NUMBER)
        request.token_ids.append(token_id)
        self.totals.generated_tokens += 1
        # In overlap a block may be computed before its last token is known.
        if len(request.token_ids) >= request.blocks.register_at:
            self._cache.register(request.blocks, request.token_ids, request.num_computed)
        if request.first_event is not None:
            self.totals.first_token_seconds += now - request.spec.arrival_s
        finish = request.finish_at(token_id)
        if finish is not None:
            self._end(request)
        return request.event(token_id, logprobs, finish)

    def _end(self, request: Request) -> None:
        match request.status:
            case RequestStatus.RUNNING:
                self._vacate(request)
            case RequestStatus.FETCHING:
                self.peers.end_fetch(request)
            case RequestStatus.HOLDING:
                self.peers.let_go(request)
                for step in self._under_way:
                    step.dropped.add(request)
            case _:
                self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.wake()
        del self._requests[request.spec.request_id]

    def _vacate(self, request: Request) -> None:
        """Takes seat and blocks from a running request; whatever is under way for it will be dropped."""
        self._running.remove(request)
        self._slots.give_back(request.slot)
        self._cache.free(request.blocks)
        for step in self._under_way:
            step.dropped.add(request)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
