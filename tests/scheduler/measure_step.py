"""Measures schedule + update of a step in which every request decodes; prints, asserts nothing.

Run as `python -m tests.scheduler.measure_step` in the repository's root.
"""

from __future__ import annotations

import statistics
import time

from sonar.config import LayerKind, SchedulerConfig
from sonar.kvcache.groups import CacheGroup
from sonar.kvcache.manager import KVCacheManager
from sonar.messages import StepResult, Submit
from sonar.sampling_params import SamplingParams
from sonar.scheduler.admission import RequestLimits
from sonar.scheduler.scheduler import Scheduler

_FULL = CacheGroup(LayerKind.FULL, (0,))
_SLIDING = CacheGroup(LayerKind.SLIDING, (1,), 512)


def measure(
    num_requests: int, prompt_len: int, groups: tuple[CacheGroup, ...], *, overlap: bool
) -> tuple[float, float]:
    """Mean microseconds of schedule and of update over 400 steps."""
    config = SchedulerConfig(max_num_requests=num_requests, max_step_tokens=8192, overlap=overlap)
    cache = KVCacheManager(groups, [num_requests * (prompt_len // 16 + 80)] * len(groups), 16)
    scheduler = Scheduler(config, RequestLimits(131072, 50000, frozenset({2})), cache)
    for i in range(num_requests):
        # Lengths differ, so that some requests need a block in each step, as in life.
        prompt = [i + 3, *range(5, 4 + prompt_len + i % 16)]
        sampling = SamplingParams(seed=i, max_tokens=900, ignore_eos=True)
        scheduler.add(Submit(incarnation=0, request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling), 0.0)
    results: list[StepResult] = []
    schedule_us: list[float] = []
    update_us: list[float] = []
    while len(update_us) < 400:
        began = time.perf_counter()
        batch = scheduler.schedule(began)
        scheduled = time.perf_counter()
        is_decode = batch is None or len(batch.slots) == sum(batch.lengths) == num_requests
        if batch is not None:
            results.append(StepResult(step=batch.step, token_ids=[7] * sum(batch.samples)))
            if is_decode:
                schedule_us.append(1e6 * (scheduled - began))
            if overlap and len(results) < 2:
                continue
        began = time.perf_counter()
        scheduler.update(results.pop(0), began)
        scheduler.take_kv_events()
        if is_decode:
            update_us.append(1e6 * (time.perf_counter() - began))
    return statistics.fmean(schedule_us), statistics.fmean(update_us)


def main() -> None:
    """Prints a table."""
    for name, groups in (("full", (_FULL,)), ("full+sliding", (_FULL, _SLIDING))):
        for overlap in (True, False):
            for num_requests in (1, 32, 256):
                schedule_us, update_us = measure(num_requests, 600, groups, overlap=overlap)
                print(
                    f"{name:13} overlap={overlap!s:5} requests={num_requests:3}: "
                    f"schedule {schedule_us:6.0f} us, update {update_us:6.0f} us"
                )


if __name__ == "__main__":
    main()
