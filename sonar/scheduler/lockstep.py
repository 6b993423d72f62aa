"""The schedulers of a replica's data-parallel groups, which take every step together.

Each group has requests, slots and KV blocks of its own; a request stays where it was put. Expert parallelism makes the
groups' ranks meet in every layer, so a step is one of all groups: those with nothing to compute join with an empty
batch, and when no group has anything there is no step. Pure. Called by the engine in the place of a `Scheduler`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from sonar.errors import ProtocolError
from sonar.kvcache.manager import KVCacheManager
from sonar.messages import (
    BlockStored,
    FinishReason,
    KVEvent,
    LeadStats,
    RequestId,
    StepBatch,
    StepResult,
    Submit,
    TokenEvent,
)
from sonar.scheduler.scheduler import Scheduler

# A group that has a prompt's beginning in its cache takes the request though it has so many more than the idlest.
_CACHE_SLACK = 1
_SUMMED = (
    "num_running",
    "num_waiting",
    "blocks_free",
    "blocks_cached",
    "blocks_in_use",
    "blocks_in_transit",
    "blocks_quarantined",
    "blocks_total",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "preemptions",
)


class LockstepScheduler:
    """Owner of the groups' schedulers.

    Args:
        groups: alike in their settings, in the order of the groups. caches: theirs, looked into to choose a group.

    Attributes:
        max_under_way: see `Scheduler`.
    """

    def __init__(self, groups: Sequence[Scheduler], caches: Sequence[KVCacheManager]) -> None:
        assert len(groups) == len(caches) > 1, "one group needs no lockstep"
        self.max_under_way = groups[0].max_under_way
        self._groups = tuple(groups)
        self._caches = tuple(caches)
        self._owners: dict[RequestId, Scheduler] = {}
        self._holders: Counter[bytes] = Counter()

    @property
    def num_open(self) -> int:
        """Requests without a terminal event."""
        return sum(group.num_open for group in self._groups)

    @property
    def can_step(self) -> bool:
        """See `Scheduler.can_step`: whether any group can."""
        return any(group.can_step for group in self._groups)

    def add(self, submit: Submit, now: float) -> TokenEvent | None:
        """Takes a request into a group: one that has its beginning in its cache, else the one with the fewest. Returns
        and raises as `Scheduler.add`."""
        if submit.request_id in self._owners:
            raise ProtocolError(f"request {submit.request_id} is submitted twice")
        group = self._choose(submit)
        event = group.add(submit, now)
        if event is None:
            self._owners[submit.request_id] = group
        return event

    def abort(self, request_id: RequestId, finish: FinishReason = FinishReason.ABORT) -> TokenEvent | None:
        """See `Scheduler.abort`."""
        group = self._owners.pop(request_id, None)
        return None if group is None else group.abort(request_id, finish)

    def schedule(self, now: float) -> StepBatch | None:
        """The next step of all groups; None when none has anything to compute now."""
        chosen = [group.schedule(now) for group in self._groups]
        if not any(chosen):
            return None
        first, *others = [batch or group.join_step() for batch, group in zip(chosen, self._groups)]
        return msgspec.structs.replace(first, others=others)

    def update(self, result: StepResult, now: float) -> list[TokenEvent]:
        """See `Scheduler.update`; the others' results are in `result.others`."""
        results = (result, *result.others)
        events = [e for group, own in zip(self._groups, results, strict=True) for e in group.update(own, now)]
        for event in events:
            if event.finish is not None:
                del self._owners[event.request_id]
        return events

    def stats(self, step_seconds: float) -> LeadStats:
        """Sums over the groups; steps are those of all."""
        every = [group.stats(step_seconds) for group in self._groups]
        return msgspec.structs.replace(every[0], **{name: sum(getattr(s, name) for s in every) for name in _SUMMED})

    def take_kv_events(self) -> list[KVEvent]:
        """Changes of what any group has cached."""
        changes: list[KVEvent] = []
        for group in self._groups:
            for event in group.take_kv_events():
                is_stored = isinstance(event, BlockStored)
                self._holders[event.block_hash] += 1 if is_stored else -1
                if self._holders[event.block_hash] == (1 if is_stored else 0):
                    changes.append(event)
                if not self._holders[event.block_hash]:
                    del self._holders[event.block_hash]
        return changes

    def check(self) -> None:
        """See `Scheduler.check`."""
        for group in self._groups:
            group.check()
        assert len(self._owners) == self.num_open, f"{self._owners.keys()} of {self.num_open} open requests"

    def _choose(self, submit: Submit) -> Scheduler:
        fewest = min(group.num_open for group in self._groups)
        near = [i for i, group in enumerate(self._groups) if group.num_open <= fewest + _CACHE_SLACK]
        tokens = [*submit.prompt_token_ids, *submit.emitted_token_ids]
        found = {i: _num_cached(self._caches[i], submit.cache_salt, tokens) for i in near}
        return self._groups[max(near, key=lambda i: (found[i], -self._groups[i].num_open))]


def _num_cached(cache: KVCacheManager, salt: str, tokens: list[int]) -> int:
    """Blocks of these tokens that the prefix cache has."""
    return cache.find_prefix(cache.new_blocks(salt), tokens) if cache.is_caching else 0
