"""The engine: requests in, token events out; schedule, execute, update.

One synchronous loop body, `step`. With overlap, step N + 1 is scheduled and handed to the executor while N runs, and
only then is the result of N waited for. Knows nothing of sockets, text or processes; its clock is handed in. Called by
the lead process (`sonar.worker.lead`) and by `sonar.llm`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sonar.config import EngineConfig, ModelConfig
from sonar.distributed.rank_link import RankLink
from sonar.kvcache.manager import KVCacheManager
from sonar.kvtransfer.build import build_exchange
from sonar.kvtransfer.exchange import KVExchange
from sonar.messages import FinishReason, KVEvent, LeadStats, RequestId, Submit, TokenEvent
from sonar.model_source import ModelSource
from sonar.packaged_model import Progress, no_progress
from sonar.scheduler.admission import RequestLimits
from sonar.scheduler.lockstep import LockstepScheduler
from sonar.scheduler.scheduler import Scheduler
from sonar.worker.executor import Executor, StepHandle
from sonar.worker.lead_loop import StepObserver
from sonar.worker.loading import LoadedRunner, load_runner
from sonar.worker.resolve import SettingRow

if TYPE_CHECKING:
    from sonar.distributed.expert_balance import ExpertBalance
    from sonar.worker.follower_loop import FollowerLoop

Clock = Callable[[], float]


@dataclass(slots=True)
class EngineTimes:
    """Where the loop's time went since the start, in seconds.

    Attributes:
        schedule_s: choosing batches and taking in results. wait_s: waiting for the executor. With overlap the executor
            works during the former, so their sum is the time the loop was busy, and wait_s is what the device adds.
    """

    schedule_s: float = 0.0
    wait_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds spent in `Engine.step`."""
        return self.schedule_s + self.wait_s


class Engine:
    """Owns the scheduler and the executor of a replica.

    After `step` has raised, the engine is of no more use than to be closed: what the failed step computed is lost.

    Args:
        depth: steps under way at once, as the scheduler allows them.
        clock: monotonic seconds.
        experts: whose load is measured, where they are spread over ranks.
        exchange: of KV blocks with other replicas; None when there is none. Whoever runs the loop calls it.

    Attributes:
        times: where the time went.
    """

    def __init__(
        self,
        scheduler: Scheduler | LockstepScheduler,
        executor: Executor,
        *,
        depth: int,
        clock: Clock = time.monotonic,
        experts: ExpertBalance | None = None,
        exchange: KVExchange | None = None,
    ) -> None:
        self.times = EngineTimes()
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._clock = clock
        self._experts = experts
        self._exchange = exchange
        self._under_way: deque[tuple[StepHandle, int]] = deque()
        self._observer: StepObserver | None = None

    @property
    def num_open(self) -> int:
        """Requests without a terminal event."""
        return self._scheduler.num_open

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do: a step is under way, or a request is open that waits for no other
        replica."""
        return bool(self._under_way) or self._scheduler.can_step

    def add(self, submit: Submit) -> TokenEvent | None:
        """Takes a request in.

        Returns:
            None, or its terminal event when its emitted tokens end it already.
        Raises:
            UserError, CapacityError, ProtocolError: see `Scheduler.add`.
        """
        if self._exchange is None and submit.kv_source is not None:
            submit = msgspec.structs.replace(submit, kv_source=None)  # there is nobody who could ask
        return self._scheduler.add(submit, self._clock())

    def abort(self, request_id: RequestId, finish: FinishReason = FinishReason.ABORT) -> TokenEvent | None:
        """Ends a request at once. Returns its terminal event; None for an id that is not open."""
        return self._scheduler.abort(request_id, finish)

    def watch(self, observer: StepObserver) -> None:
        """Tells the observer when a step is waited for, and when its result is there."""
        self._observer = observer

    def step(self) -> list[TokenEvent]:
        """Hands out the next step and takes in the oldest one under way; the events of that one.

        No events come while the pipeline fills, and from steps that finish no prompt. Never waits without a step under
        way. Raises what a step raised.
        """
        began = self._clock()
        batch = self._scheduler.schedule(began)
        if batch is not None:
            num_tokens = sum(batch.lengths) + sum(sum(other.lengths) for other in batch.others)
            self._under_way.append((self._executor.submit(batch), num_tokens))
        scheduled = self._clock()
        self.times.schedule_s += scheduled - began
        is_filling = batch is not None and len(self._under_way) < self._depth
        if is_filling or not self._under_way:
            return []
        handle, num_tokens = self._under_way.popleft()
        if self._observer is not None:
            self._observer.step_began(num_tokens)
        result = handle.result()
        if self._observer is not None:
            self._observer.step_ended(num_tokens)
        arrived = self._clock()
        self.times.wait_s += arrived - scheduled
        events = self._scheduler.update(result, arrived)
        self.times.schedule_s += self._clock() - arrived
        return events

    def stats(self) -> LeadStats:
        """Figures for the head; `step_seconds` is the time spent in `step`."""
        stats = self._scheduler.stats(self.times.busy_s)
        if self._experts is not None:
            stats = msgspec.structs.replace(
                stats, expert_imbalance=self._experts.worst_imbalance, experts_moved=self._experts.num_moved
            )
        return stats if self._exchange is None else msgspec.structs.replace(stats, pairs=self._exchange.stats())

    def take_kv_events(self) -> list[KVEvent]:
        """Net changes of the prefix cache since the last call."""
        return self._scheduler.take_kv_events()

    def check(self) -> None:
        """Asserts the accounting of requests, slots and blocks; for tests and fault drills."""
        self._scheduler.check()

    def close(self) -> None:
        """Ends the executor after the steps under way; open requests get no event."""
        self._under_way.clear()
        if self._exchange is not None:
            self._exchange.close()
        self._executor.close()


@dataclass(frozen=True)
class BuiltEngine:
    """An engine ready for requests, and what its owner reports of it.

    Attributes:
        config: without `auto`. settings: the table of what was resolved and why, to print.
        limits: what is asked of a request (`sonar.scheduler.admission.make_spec` checks one by them).
        num_blocks: of all cache groups together, as in `LeadStats.blocks_total`.
        exchange: of KV blocks with other replicas, for whoever runs the loop.
    """

    engine: Engine
    config: EngineConfig
    model_config: ModelConfig
    source: ModelSource
    settings: tuple[SettingRow, ...]
    limits: RequestLimits
    num_blocks: int
    weights_bytes: int
    ops_backend: str
    exchange: KVExchange | None = None

    @property
    def max_model_len(self) -> int:
        """Prompt + output tokens of a request."""
        return self.config.scheduler.max_model_len

    @property
    def notices(self) -> tuple[str, ...]:
        """What of the settings the owner of the server has to be told."""
        return tuple(row.warning for row in self.settings if row.warning)


def build_engine(
    config: EngineConfig,
    progress: Progress = no_progress,
    *,
    incarnation: int = 0,
    cache_dir: Path | None = None,
    link: RankLink | None = None,
) -> BuiltEngine:
    """Loads a model and puts an engine around it.

    Args:
        progress: told (phase, done, total) as loading goes.
        incarnation: of the replica, put on its messages.
        cache_dir: for downloaded and derived files; None = the user's cache folder.
        link: of this process, the replica's rank 0, when there are more ranks.

    Raises:
        ModelError, ConfigError, CapacityError: with the remedy. RemoteError: another rank did not come.
    """
    loaded = load_runner(config, progress, cache_dir, link=link)
    limits = RequestLimits(
        max_model_len=loaded.config.scheduler.max_model_len,
        vocab_size=loaded.model_config.vocab_size,
        eos_token_ids=frozenset(loaded.model_config.eos_token_ids),
    )
    scheduler = _make_scheduler(loaded, limits, incarnation)
    executor: Executor = loaded.runner
    if loaded.ranks is not None:
        from sonar.worker.group_executor import GroupExecutor  # with it come torch's process groups

        executor = GroupExecutor(loaded.runner, loaded.ranks)
    exchange = None
    if loaded.config.kv_transfer != "none":
        assert isinstance(scheduler, Scheduler), "KV transfer between replicas of one rank alone"
        exchange = build_exchange(loaded, scheduler)
    return BuiltEngine(
        engine=Engine(
            scheduler,
            executor,
            depth=scheduler.max_under_way,
            exchange=exchange,
            experts=loaded.runner.experts,
        ),
        config=loaded.config,
        model_config=loaded.model_config,
        source=loaded.source,
        settings=loaded.settings,
        limits=limits,
        num_blocks=sum(loaded.num_blocks) * loaded.config.parallel.num_groups,
        weights_bytes=loaded.weights_bytes,
        ops_backend=loaded.ops_backend,
        exchange=exchange,
    )


def build_follower(config: EngineConfig, *, link: RankLink) -> FollowerLoop:
    """Loads the part of a rank other than 0; its loop computes what the lead sends.

    Raises:
        ModelError, ConfigError, CapacityError, RemoteError: as `build_engine`.
    """
    from sonar.worker.follower_loop import FollowerLoop

    loaded = load_runner(config, link=link)
    assert loaded.ranks is not None, "a replica of one rank has no followers"
    return FollowerLoop(loaded.runner, loaded.ranks)


def _make_scheduler(loaded: LoadedRunner, limits: RequestLimits, incarnation: int) -> Scheduler | LockstepScheduler:
    config = loaded.config

    caches = [
        KVCacheManager(
            loaded.groups,
            loaded.num_blocks,
            config.cache.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        for _ in range(config.parallel.num_groups)
    ]
    groups = [
        Scheduler(config.scheduler, limits, cache, incarnation, num_stages=config.parallel.pp_size) for cache in caches
    ]
    return groups[0] if len(groups) == 1 else LockstepScheduler(groups, caches)
