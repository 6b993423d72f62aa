"""A scheduler, a fake executor and the clients around them; every event is checked as it comes.

Called by the scheduler's tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sonar.config import LayerKind, SchedulerConfig
from sonar.kvcache.groups import CacheGroup
from sonar.kvcache.manager import KVCacheManager
from sonar.messages import BlockStored, FinishReason, KVSource, StepBatch, Submit, TokenEvent
from sonar.sampling_params import SamplingParams
from sonar.scheduler.admission import RequestLimits
from sonar.scheduler.scheduler import Scheduler

from .fake_executor import EOS, VOCAB_SIZE, FakeExecutor, draw, fingerprint, fingerprints, row_of

FULL = CacheGroup(LayerKind.FULL, (0, 1))


def sliding(window: int) -> CacheGroup:
    """A group of sliding layers."""
    return CacheGroup(LayerKind.SLIDING, (2, 3), window)


def fault_free(submit: Submit, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The output tokens of a request computed alone, from the start, with nothing ever going wrong."""
    sampling = submit.sampling
    limit = max_model_len - len(submit.prompt_token_ids)
    if sampling.max_tokens is not None:
        limit = min(limit, sampling.max_tokens)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    output: list[int] = []
    history = fingerprints(submit.prompt_token_ids)[-1]
    while True:
        token_id = draw(history, sampling, len(output))
        history = fingerprint(history, token_id)
        output.append(token_id)
        if token_id in stops and len(output) > sampling.min_tokens:
            return output, FinishReason.STOP
        if len(output) == limit:
            return output, FinishReason.LENGTH


@dataclass
class Client:
    """What one client has been told."""

    submit: Submit
    expected: list[int]
    expected_finish: FinishReason
    output: list[int]
    num_events: int = 0
    num_cached_tokens: int = -1
    finish: FinishReason | None = None


@dataclass
class World:
    """Everything of a test; the defaults are one full group and room for a few short requests."""

    groups: tuple[CacheGroup, ...] = (FULL,)
    num_blocks: tuple[int, ...] = (32,)
    block_size: int = 4
    max_model_len: int = 64
    config: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(max_num_requests=4, max_step_tokens=16))
    caching: bool = True
    num_stages: int = 1

    def __post_init__(self) -> None:
        self.cache = KVCacheManager(self.groups, self.num_blocks, self.block_size, enable_prefix_caching=self.caching)
        self.limits = RequestLimits(self.max_model_len, VOCAB_SIZE, frozenset({EOS}))
        self.scheduler = Scheduler(self.config, self.limits, self.cache, incarnation=7, num_stages=self.num_stages)
        self.executor = FakeExecutor(
            self.groups, self.num_blocks, self.block_size, self.config.max_num_requests, self.config.max_step_tokens
        )
        self.clients: dict[str, Client] = {}
        self.open: list[str] = []
        self.now = 0.0
        self.router: set[bytes] = set()

    def request(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        *,
        num_emitted: int = 0,
        priority: int = 0,
        salt: str = "",
        source: KVSource | None = None,
    ) -> Client:
        """Submits a request, of whose output an earlier incarnation has sent `num_emitted` tokens."""
        sampling = sampling or SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
        fresh = Submit(incarnation=7, request_id=name, prompt_token_ids=prompt, sampling=sampling)
        expected, finish = fault_free(fresh, self.max_model_len)
        emitted = expected[:num_emitted]
        submit = Submit(
            incarnation=7,
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            emitted_token_ids=emitted,
            priority=priority,
            cache_salt=salt,
            kv_source=source,
        )
        event = self.scheduler.add(submit, self.now)
        client = Client(submit, expected, finish, list(emitted))
        self.clients[name] = client
        self.open.append(name)
        if event is not None:
            self.receive(event)
        return client

    def receive(self, event: TokenEvent) -> None:
        """Checks an event against the fault-free run."""
        client = self.clients[event.request_id]
        assert client.finish is None, "an event after the terminal one"
        assert event.first == len(client.output), "a gap or a repeat"
        client.output.extend(event.token_ids)
        assert client.output == client.expected[: len(client.output)]
        assert (event.num_cached_tokens >= 0) == (client.num_events == 0)
        client.num_cached_tokens = max(client.num_cached_tokens, event.num_cached_tokens)
        self._check_logprobs(client, event)
        client.num_events += 1
        if event.finish is not None:
            client.finish = event.finish
            self.open.remove(event.request_id)
            if event.finish in (FinishReason.STOP, FinishReason.LENGTH):
                assert (client.output, event.finish) == (client.expected, client.expected_finish)
            stop = client.output[-1] if event.finish is FinishReason.STOP else None
            assert event.stop_token_id == stop
        else:
            assert event.token_ids and client.output != client.expected, "the request should have ended"

    def schedule(self) -> StepBatch | None:
        """One call of schedule; the batch goes to the executor."""
        self.now += 0.001
        batch = self.scheduler.schedule(self.now)
        if batch is not None:
            self.executor.submit(batch)
        return batch

    def update(self) -> list[TokenEvent]:
        """The result of the oldest step under way goes to the scheduler."""
        events = self.scheduler.update(self.executor.results.popleft(), self.now)
        for event in events:
            self.receive(event)
        return events

    def abort(self, name: str) -> None:
        """A client goes away."""
        event = self.scheduler.abort(name)
        assert event is not None and event.finish is FinishReason.ABORT
        self.receive(event)

    def step(self) -> StepBatch | None:
        """What an engine loop does once: schedule, and take in a result when no more may be under way."""
        batch = self.schedule()
        if self.executor.results and (batch is None or not self.config.overlap):
            self.update()
        return batch

    def finish_all(self) -> None:
        """Runs until nothing is open; then every block must be back."""
        while self.scheduler.num_open or self.executor.results:
            before = (self.executor.num_computed_tokens, len(self.executor.results))
            self.step()
            assert before != (self.executor.num_computed_tokens, len(self.executor.results)), "no progress"
        counts = self.cache.counts()
        assert counts.in_use == 0 and counts.free + counts.cached == counts.total, counts
        assert not self.open
        self.check()

    def check(self) -> None:
        """All invariants, that no request holds more than its windows need, that the router knows what is cached."""
        self.scheduler.check()
        for request in self.scheduler._running:
            for group, table in zip(self.groups, request.blocks.tables):
                limit = group.max_blocks(self.max_model_len, self.config.max_step_tokens, self.block_size)
                assert len(table.ids) <= limit, f"{len(table.ids)} blocks of {group.kind}, {limit} at most"
        for event in self.scheduler.take_kv_events():
            if isinstance(event, BlockStored):
                assert event.block_hash not in self.router
                self.router.add(event.block_hash)
            else:
                self.router.remove(event.block_hash)
        told = next((g for g, group in enumerate(self.groups) if group.kind is LayerKind.FULL), 0)
        assert self.router == self.cache.pools[told].cached_hashes()

    def _check_logprobs(self, client: Client, event: TokenEvent) -> None:
        sampling = client.submit.sampling
        asked = sampling.logprobs is not None
        assert [row[0].token_id for row in event.logprobs] == (event.token_ids if asked else [])
        is_first = client.num_events == 0 and event.token_ids and not client.submit.emitted_token_ids
        if sampling.prompt_logprobs is not None and is_first:
            prints = fingerprints(client.submit.prompt_token_ids)
            assert event.prompt_logprobs == [row_of(history) for history in prints[:-1]]
            assert event.num_cached_tokens == 0
        else:
            assert event.prompt_logprobs == []
