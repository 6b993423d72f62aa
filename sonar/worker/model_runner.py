"""Computes steps on this rank's device: the `Executor` the engine loop drives.

Steps run one after another in a thread of their own, so that the loop schedules the next while one runs; on CUDA that
thread only queues work, and `result()` waits for the copies to the host. Knows nothing of requests, ids, scheduling or
sockets. Made by `sonar.worker.loading`.

`_forward` is the seam for captured graphs: for a decode-only batch (every length 1, every row sampled) it is a function
of one `ForwardBatch` of static shapes and nothing else, from input tokens to logits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sonar.distributed.expert_balance import ExpertBalance
from sonar.messages import StepBatch, StepResult
from sonar.models.base import Model
from sonar.ops.table import SampleFn, TensorParallel
from sonar.worker.cuda_graphs import DecodeGraphs
from sonar.worker.draw_plan import Vocabulary
from sonar.worker.input_builder import InputBuilder
from sonar.worker.inputs import PromptRows, StepInputs
from sonar.worker.kv_cache import CacheLayout, KVCache
from sonar.worker.logprobs import TokenLogprobs, normalize, score
from sonar.worker.pipeline_stage import PipelineStage
from sonar.worker.results import PendingResult, PromptScores, StepOutcome
from sonar.worker.sampler import Sampler
from sonar.worker.shared_sampler import SharedSampler
from sonar.worker.slots import SlotTable
from sonar.worker.step_thread import RunningCall, StepThread

MAX_UNDER_WAY = 2
# Rows of logits held at once for prompt_logprobs: 256 of a 150k vocabulary are 150 MB, a whole chunk were gigabytes.
_PROMPT_ROWS = 256


@dataclass(frozen=True)
class RunnerParts:
    """What a runner is made of; all on one device.

    Attributes:
        threads: CPU threads torch may use in the runner's thread; 0 leaves torch's own choice.
        is_capturable: the ops may be captured in CUDA graphs; `ModelRunner.prepare` then does so for decode steps.
        parallel: the ranks that hold the other columns of the logits. stage: this rank's place in a pipeline.
        max_under_way: steps that may be submitted before the first is done.
        experts: of a model whose experts are spread over ranks, which all compute every step, with requests or without.
    """

    model: Model
    cache: KVCache
    slots: SlotTable
    sample: SampleFn
    vocabulary: Vocabulary
    device: torch.device
    threads: int = 0
    is_capturable: bool = False
    parallel: TensorParallel | None = None
    stage: PipelineStage | None = None
    max_under_way: int = MAX_UNDER_WAY
    experts: ExpertBalance | None = None


class RunningStep:
    """A step under way (`StepHandle`)."""

    def __init__(self, call: RunningCall[PendingResult]) -> None:
        self._call = call

    @property
    def is_done(self) -> bool:
        """Whether this rank's thread is done with the step."""
        return self._call.is_done

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part raised: `result` does."""
        return self._call.error is not None

    def result(self) -> StepResult:
        """Waits for the step; raises what it raised. Once only."""
        return self._call.result().wait()


class ModelRunner:
    """Owns the model, the cache and the slots of a rank, and the thread that alone touches them (`Executor`)."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._inputs = InputBuilder(parts.slots, parts.cache, parts.device)
        self._sampler = _make_sampler(parts)
        self._thread = StepThread("model-runner", partial(_enter_thread, parts.device, parts.threads))
        self._under_way: deque[RunningCall[PendingResult]] = deque()
        self._failed: BaseException | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def max_under_way(self) -> int:
        """Steps that may be submitted before the first is done."""
        return self._parts.max_under_way

    @property
    def experts(self) -> ExpertBalance | None:
        """Of a model whose experts are spread over ranks."""
        return self._parts.experts

    @property
    def cache_addresses(self) -> tuple[int, ...]:
        """Where each cache group's blocks lie, in the memory of the process or the device."""
        return tuple(tensor.data_ptr() for tensor in self._parts.cache.tensors)

    @property
    def cache_layout(self) -> CacheLayout:
        """Their shape."""
        return self._parts.cache.layout

    def prepare(self) -> None:
        """Captures what can be captured, before the first step; waits for it. Raises what that raised."""
        if self._parts.is_capturable:
            self._thread.submit(self._capture).result()

    def submit(self, batch: StepBatch) -> RunningStep:
        """Starts a step and returns at once. After a step has failed every later one raises the same error: the slots
        may be half changed."""
        while self._under_way and self._under_way[0].is_done:
            self._under_way.popleft()
        most = self._parts.max_under_way
        assert len(self._under_way) < most, f"step {batch.step}: {most} steps are under way"
        call = self._thread.submit(partial(self._run, batch))
        self._under_way.append(call)
        return RunningStep(call)

    def close(self) -> None:
        """Ends the thread after the steps under way, and drops model and cache."""
        self._thread.close()
        self._under_way.clear()
        del self._inputs, self._sampler, self._parts, self._graphs

    def _capture(self) -> None:
        parts = self._parts
        with torch.inference_mode():
            graphs = DecodeGraphs(
                parts.model,
                parts.cache,
                parts.sample,
                parts.device,
                max_requests=len(parts.slots.params),
                max_blocks=parts.slots.block_tables.max_blocks,
            )
            graphs.warm_up()
            graphs.capture()
        self._graphs = graphs

    def _run(self, batch: StepBatch) -> PendingResult:
        if self._failed is not None:
            raise self._failed
        try:
            with torch.inference_mode():
                return PendingResult(self._compute(batch), self._parts.device)
        except BaseException as error:
            self._failed = error
            raise

    def _compute(self, batch: StepBatch) -> StepOutcome:
        parts, stage = self._parts, self._parts.stage
        if parts.experts is not None:
            parts.experts.before_step(batch.step)
        if stage is not None:
            stage.settle(batch)
        parts.slots.apply(batch)
        parts.cache.copy(batch.copies)
        if not batch.slots:
            if parts.experts is not None:
                forward = self._inputs.nothing()
                parts.model.forward(forward if stage is None else stage.with_hidden(forward))
            return StepOutcome(batch.step, 0, None, None, None, None)
        inputs = self._inputs.build(batch)
        if stage is not None:
            inputs = inputs._replace(forward=stage.with_hidden(inputs.forward))
            if not stage.is_last:
                stage.pass_on(parts.model.forward(inputs.forward), batch, inputs.write_S)
                return StepOutcome(batch.step, 0, None, None, None, None)
        num_sampled = len(inputs.sampled_slots)
        # Planned before the forward pass, so that a GPU has its settings before it has its logits.
        plan = self._sampler.plan(inputs.sampled_slots, inputs.sampled_positions) if num_sampled else None
        hidden_TD, logits_SV, greedy_S = self._forward(inputs)
        prompt = None if inputs.prompt is None else self._score_prompt(hidden_TD, inputs.prompt)
        if plan is None or logits_SV is None:
            return StepOutcome(batch.step, 0, None, None, None, prompt)
        # A hidden state with a NaN spoils every logit, so one column tells; taken now, for the draw overwrites them.
        is_nan_S = logits_SV[:, 0].isnan()
        drawn = self._sampler.draw(logits_SV, plan, inputs.write_S, greedy_S)
        if stage is not None:
            stage.send_tokens(drawn.token_S)
        # The history keeps the token that was drawn: the next step may be computing with it already.
        token_S = drawn.token_S.masked_fill(is_nan_S, -1)
        # Tensor-parallel ranks but the first have no log-probabilities to report.
        asked = None if drawn.logprobs is None else plan.composition.logprobs
        return StepOutcome(batch.step, num_sampled, token_S, asked, drawn.logprobs, prompt)

    def _forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Hidden states of all rows, logits of the sampled ones, and their likeliest tokens if those are known."""
        if self._graphs is not None and self._graphs.can_run(inputs):
            return self._graphs.run(inputs)
        model = self._parts.model
        hidden_TD = model.forward(inputs.forward)
        if inputs.sampled_rows_S is None:
            return hidden_TD, model.logits(hidden_TD), None
        if len(inputs.sampled_slots) == 0:
            return hidden_TD, None, None
        return hidden_TD, model.logits(hidden_TD.index_select(0, inputs.sampled_rows_S)), None

    def _score_prompt(self, hidden_TD: Tensor, prompt: PromptRows) -> PromptScores | None:
        slots = self._parts.slots
        alternatives = [slots.settings(slot).prompt_logprobs or 0 for slot in prompt.slots]
        targets_Q = slots.history.read(prompt.targets_Q)
        pieces = []
        for rows, targets in zip(torch.split(prompt.rows_Q, _PROMPT_ROWS), torch.split(targets_Q, _PROMPT_ROWS)):
            logits_QV = self._sampler.whole(self._parts.model.logits(hidden_TD.index_select(0, rows)))
            if logits_QV is not None:
                pieces.append(score(normalize(logits_QV), targets, max(alternatives)))
        if not pieces:
            return None  # the first tensor-parallel rank has them
        scored = TokenLogprobs(*(torch.cat(columns) for columns in zip(*pieces)))
        return PromptScores(prompt.slots, prompt.counts, alternatives, scored)


def _enter_thread(device: torch.device, threads: int) -> None:
    """Settings torch keeps per thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if threads:
        torch.set_num_threads(threads)


def _make_sampler(parts: RunnerParts) -> Sampler | SharedSampler:
    sampler = Sampler(parts.slots, parts.sample, parts.vocabulary, parts.device)
    if parts.parallel is None:
        return sampler
    return SharedSampler(sampler, parts.slots, parts.sample, parts.vocabulary.size, parts.parallel)
