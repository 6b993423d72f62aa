"""Where a decode step's time goes: kernels on the device, and the runner's and the engine's time on the host.

python -m benchmarks.gpu.profile_step qwen3-0.6b 1 32 256
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections import defaultdict

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.workloads import build, make_work
from sonar.engine import Engine
from sonar.messages import StepBatch, Submit
from sonar.sampling_params import SamplingParams
from sonar.worker.model_runner import ModelRunner
from sonar.worker.results import StepOutcome

_STEPS = 40


def profile_decode(engine: Engine, batch: int, vocab_size: int) -> None:
    """Prints kernels by time of `_STEPS` decode steps."""
    work = make_work(f"decode_b{batch}", vocab_size, seed=batch)
    for i, prompt in enumerate(work.prompts):
        sampling = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0, seed=i)
        engine.add(Submit(incarnation=0, request_id=f"p{batch}-{i}", prompt_token_ids=prompt, sampling=sampling))
    for _ in range(30):
        engine.step()
    before, began = (engine.times.schedule_s, engine.times.wait_s, RUNNER_S[0]), time.perf_counter()
    for _ in range(_STEPS):
        engine.step()
    wall = (time.perf_counter() - began) / _STEPS
    after = (engine.times.schedule_s, engine.times.wait_s, RUNNER_S[0])
    shares = [1e3 * (b - a) / _STEPS for a, b in zip(before, after)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            engine.step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            kernels[event.name].append(event.device_time)
    total = sum(map(sum, kernels.values())) / _STEPS
    print(f"batch {batch}: step {1e3 * wall:.3f} ms wall, kernels sum {total / 1e3:.3f} ms; host: schedule+update "
          f"{shares[0]:.3f} ms, wait {shares[1]:.3f} ms, runner thread {shares[2]:.3f} ms")  # fmt: skip
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:16]:
        count, mean = len(times) / _STEPS, sum(times) / len(times)
        print(f"   {count * mean:9.1f} us a step  {count:6.1f} x {mean:7.2f} us  {name[:80]}")
    PROFILER.clear()
    IS_PROFILED[0] = True
    for _ in range(_STEPS):
        engine.step()
    IS_PROFILED[0] = False
    while engine.has_work:
        engine.step()
    pstats.Stats(PROFILER).sort_stats("tottime").print_stats(14)


RUNNER_S = [0.0]
IS_PROFILED = [False]
PROFILER = cProfile.Profile()


def main() -> None:
    """Profiles the batches named on the command line."""
    inner = ModelRunner._compute

    def timed(self: ModelRunner, batch: StepBatch) -> StepOutcome:
        if IS_PROFILED[0]:
            PROFILER.enable()
        began = time.perf_counter()
        outcome = inner(self, batch)
        RUNNER_S[0] += time.perf_counter() - began
        if IS_PROFILED[0]:
            PROFILER.disable()
        return outcome

    ModelRunner._compute = timed  # type: ignore[method-assign]
    built = build(sys.argv[1], False, 512, 16384)
    for batch in map(int, sys.argv[2:]):
        profile_decode(built.engine, batch, built.model_config.vocab_size)
    built.engine.close()


if __name__ == "__main__":
    main()
