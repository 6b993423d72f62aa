"""Where the time of a whole workload goes: steps by kind, device idle time, kernels, and the runner's Python.

    python -m benchmarks.gpu.profile_work llama-3.1-8b mix_256 throughput_512_128

Runs each workload twice. The first run times every step and sums them by kind. The second profiles windows: kernels of
the first steps and of later ones, then Python. Knows the engine as `benchmarks.gpu.workloads` builds it.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.workloads import Work, build, make_work, run
from sonar.engine import BuiltEngine, Engine
from sonar.messages import StepBatch, Submit
from sonar.sampling_params import SamplingParams
from sonar.worker.model_runner import ModelRunner
from sonar.worker.results import StepOutcome

# Steps of the windows; the first ones hold the prompts.
_WINDOWS = ((2, 10), (60, 80))
_PYTHON_STEPS = (100, 140)


@dataclass
class StepWatch:
    """What the runner's thread computes: (decodes, chunk tokens, seconds in `_compute`) of each step."""

    steps: list[tuple[int, int, float]] = field(default_factory=list)
    profiler: cProfile.Profile | None = None


@contextmanager
def watch_steps() -> Iterator[StepWatch]:
    """Wraps the runner while the context is open."""
    inner, watch = ModelRunner._compute, StepWatch()

    def timed(self: ModelRunner, batch: StepBatch) -> StepOutcome:
        profiler = watch.profiler
        if profiler is not None:
            profiler.enable()
        began = time.perf_counter()
        outcome = inner(self, batch)
        seconds = time.perf_counter() - began
        if profiler is not None:
            profiler.disable()
        decodes = sum(1 for length in batch.lengths if length == 1)
        watch.steps.append((decodes, sum(batch.lengths) - decodes, seconds))
        return outcome

    ModelRunner._compute = timed  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        ModelRunner._compute = inner  # type: ignore[method-assign]


def submit(engine: Engine, work: Work, name: str) -> None:
    """Hands the work's requests in."""
    for i, (prompt, num_out) in enumerate(zip(work.prompts, work.outputs)):
        sampling = SamplingParams(max_tokens=num_out, ignore_eos=True, temperature=work.temperature, seed=i)
        engine.add(Submit(incarnation=0, request_id=f"{name}-{i}", prompt_token_ids=prompt, sampling=sampling))


def time_steps(engine: Engine, work: Work, name: str) -> None:
    """Prints seconds by kind of step."""
    submit(engine, work, f"{name}-timed")
    walls: list[float] = []
    with watch_steps() as watch:
        began = time.perf_counter()
        while engine.has_work:
            before = time.perf_counter()
            engine.step()
            walls.append(time.perf_counter() - before)
        whole = time.perf_counter() - began
    kinds: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for (decodes, chunk, host), wall in zip(watch.steps, walls[1:]):
        size = 1 << max(decodes - 1, 0).bit_length()
        kinds[f"mixed {size}" if chunk else f"decode <= {size}"].append((wall, host, decodes + chunk))
    print(f"{name}: {whole:.3f} s, {len(watch.steps)} steps; engine {engine.times}")
    for kind, rows in kinds.items():
        wall, host, tokens = (sum(column) for column in zip(*rows))
        print(f"   {kind:14} {len(rows):5} steps {wall:7.3f} s, {1e3 * wall / len(rows):8.3f} ms a step, "
              f"runner {1e3 * host / len(rows):7.3f} ms, {tokens / len(rows):8.1f} tokens a step")  # fmt: skip
    first = [f"{d}+{c}:{1e3 * w:.1f}/{1e3 * h:.1f}" for (d, c, h), w in zip(watch.steps, walls[1:])][:24]
    print("   first steps, decodes+chunk:wall/runner ms ", *first)


def profile_windows(engine: Engine, work: Work, name: str) -> None:
    """Prints kernels and idle time of windows of steps, and Python's time in another."""
    submit(engine, work, f"{name}-profiled")
    done = 0
    with watch_steps() as watch:
        for begin, end in _WINDOWS:
            while done < begin and engine.has_work:
                engine.step()
                done += 1
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                while done < end and engine.has_work:
                    engine.step()
                    done += 1
                torch.cuda.synchronize()
            print(f"{name}: steps {begin} to {end - 1}, (decodes, chunk tokens): "
                  f"{[step[:2] for step in watch.steps[begin:end]][:8]}")  # fmt: skip
            _print_kernels(profiler, end - begin)
        while engine.has_work:
            if done == _PYTHON_STEPS[0]:
                watch.profiler = cProfile.Profile()
            engine.step()
            done += 1
            if done == _PYTHON_STEPS[1] and watch.profiler is not None:
                runner, watch.profiler = watch.profiler, None
                print("runner's thread,", _PYTHON_STEPS[1] - _PYTHON_STEPS[0], "steps")
                pstats.Stats(runner).sort_stats("tottime").print_stats(12)


def _print_kernels(profiler: profile, num_steps: int) -> None:
    kernels: dict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float]] = []
    for event in profiler.events():  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA:
            kernels[event.name].append(event.device_time)
            spans.append((event.time_range.start, event.time_range.end))
    if not spans:
        return
    spans.sort()
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - spans[0][0]
    print(f"   device: {whole / 1e3 / num_steps:.3f} ms a step, idle {1 - busy / whole:.1%}")
    for kernel, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:18]:
        print(f"   {sum(times) / num_steps:10.1f} us a step  {len(times) / num_steps:7.1f} x "
              f"{sum(times) / len(times):8.2f} us  {kernel[:90]}")  # fmt: skip


def profile_work(built: BuiltEngine, name: str) -> None:
    """Both runs of a workload."""
    vocab_size = built.model_config.vocab_size
    warm = make_work(name, vocab_size, seed=2)
    run(built, Work(warm.prompts[:64], [2] * 64, warm.temperature), f"{name}-warm")
    time_steps(built.engine, make_work(name, vocab_size, seed=1), name)
    profile_windows(built.engine, make_work(name, vocab_size, seed=5), name)


def main() -> None:
    """Profiles the workloads named on the command line."""
    built = build(sys.argv[1], False, 512, 16384)
    for name in sys.argv[2:]:
        profile_work(built, name)
    built.engine.close()


if __name__ == "__main__":
    main()
