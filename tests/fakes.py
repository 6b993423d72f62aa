"""An engine that computes nothing: its tokens are a function of prompt, seed and position, so any continuation of a
stream can be checked. Torch-free; an agent starts it under the name it is given with `--engine fake=tests.fakes:...`.

What it does is in the model's name: "fake", then words, e.g. "fake step_ms=20 load_steps=3".
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sonar.config import EngineConfig
from sonar.errors import ModelError, UserError
from sonar.messages import FinishReason, KVEvent, LeadStats, Submit, TokenEvent
from sonar.worker.lead_loop import StepObserver

# First prompt tokens with a meaning. POISON: the engine raises when it comes to token 3. BAD: refused by `add`.
POISON, BAD = 666, 667
VOCAB_SIZE = 50_000
FAKE_ENGINE_FLAG = "fake=tests.fakes:build_fake_engine"


def fake_token(prompt: list[int], seed: int, position: int) -> int:
    """Token `position` of the output."""
    return (sum(prompt) * 31 + seed * 17 + position * 7) % VOCAB_SIZE


def fake_output(prompt: list[int], seed: int, count: int) -> list[int]:
    """The unbroken run."""
    return [fake_token(prompt, seed, position) for position in range(count)]


@dataclass
class _Running:
    submit: Submit
    position: int


class FakeEngine:
    """One token a step for each request; a step takes `step_ms`."""

    def __init__(self, step_ms: float, max_num_requests: int, hang_at: int, vocab_size: int = VOCAB_SIZE) -> None:
        self._vocab_size = vocab_size
        self._step_s = step_ms / 1000
        self._max = max_num_requests
        self._hang_at = hang_at
        self._running: dict[str, _Running] = {}
        self._steps = 0
        self._generated = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add(self, submit: Submit) -> TokenEvent | None:
        if submit.prompt_token_ids[0] == BAD:
            raise UserError("prompt: token 667 is not served here", param="prompt")
        self._running[submit.request_id] = _Running(submit, len(submit.emitted_token_ids))
        return None

    def abort(self, request_id: str, finish: FinishReason) -> TokenEvent | None:
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        return TokenEvent(request_id=request_id, first=running.position, token_ids=[], finish=finish)

    def watch(self, observer: StepObserver) -> None:
        self._observer = observer

    def step(self) -> list[TokenEvent]:
        num_tokens = len(self._running)
        self._observer.step_began(num_tokens)
        events = self._compute()
        self._observer.step_ended(num_tokens)
        return events

    def _compute(self) -> list[TokenEvent]:
        time.sleep(self._step_s)
        self._steps += 1
        if self._steps == self._hang_at:
            time.sleep(3600)
        events = [self._advance(running) for running in list(self._running.values())[: self._max]]
        for event in events:
            if event.finish is not None:
                del self._running[event.request_id]
        return events

    def _advance(self, running: _Running) -> TokenEvent:
        submit, position = running.submit, running.position
        if submit.prompt_token_ids[0] == POISON and position >= 3:
            raise ArithmeticError("poisoned")
        running.position += 1
        self._generated += 1
        assert submit.sampling.seed is not None
        is_last = running.position == submit.sampling.max_tokens
        return TokenEvent(
            request_id=submit.request_id,
            first=position,
            token_ids=[fake_token(submit.prompt_token_ids, submit.sampling.seed, position) % self._vocab_size],
            finish=FinishReason.LENGTH if is_last else None,
            num_cached_tokens=0 if position == len(submit.emitted_token_ids) else -1,
        )

    def stats(self) -> LeadStats:
        return LeadStats(
            incarnation=0,
            steps=self._steps,
            num_running=len(self._running),
            num_waiting=0,
            blocks_free=64,
            blocks_cached=0,
            blocks_in_use=0,
            blocks_in_transit=0,
            blocks_total=64,
            prompt_tokens=0,
            cached_tokens=0,
            generated_tokens=self._generated,
            preemptions=0,
            step_seconds=self._steps * self._step_s,
        )

    def take_kv_events(self) -> list[KVEvent]:
        return []

    def close(self) -> None:
        print("fake engine closed")


@dataclass
class FakeBuilt:
    """What `sonar.worker.lead` asks of a built engine."""

    engine: FakeEngine
    config: EngineConfig
    num_blocks: int = 64
    max_model_len: int = 4096
    weights_bytes: int = 1
    ops_backend: str = "fake"
    notices: tuple[str, ...] = ()
    exchange: None = None


@dataclass
class _Words:
    words: dict[str, str] = field(default_factory=dict)

    def number(self, name: str, default: float = 0.0) -> float:
        return float(self.words.get(name, default))


def build_fake_engine(
    config: EngineConfig, progress: Callable[[str, int, int], None], *, incarnation: int
) -> FakeBuilt:
    """Obeys the words of `config.model`.

    step_ms, load_steps (of 50 ms each): numbers. fail: "user" or "crash" at the start; crash_until: crash while the
    incarnation is below. child: starts a process that would outlive it. hang_at: the step that never ends. vocab: token
    ids are below it.
    """
    pairs = (word.partition("=") for word in config.model.split()[1:])
    words = _Words({name: value for name, _, value in pairs})
    print(f"building {config.model!r}, incarnation {incarnation}")
    for done in range(int(words.number("load_steps", 2))):
        progress("weights", done, int(words.number("load_steps", 2)))
        time.sleep(0.05)
    if words.words.get("fail") == "user":
        raise ModelError("model 'x' is no file, folder, alias or hub id; give one")
    if words.words.get("fail") == "crash" or incarnation < words.number("crash_until"):
        print("last words before the crash", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if "child" in words.words:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    engine = FakeEngine(
        words.number("step_ms", 5),
        config.scheduler.max_num_requests,
        int(words.number("hang_at", -1)),
        int(words.number("vocab", VOCAB_SIZE)),
    )
    return FakeBuilt(engine, config)
