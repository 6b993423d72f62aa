"""The executor of a replica with several ranks: tells the others of each step, computes the lead's part of it.

Results are the lead's own, or those of the last pipeline stage, which come by the result link. An error of this rank is
raised; one of another rank ends this process from outside, for the head hears of it from that rank or its agent. Called
by the engine loop.
"""

from __future__ import annotations

from sonar.distributed.step_link import ResultReceiver
from sonar.messages import StepBatch, StepResult
from sonar.worker.executor import StepHandle
from sonar.worker.model_runner import ModelRunner, RunningStep
from sonar.worker.ranks import Ranks

_LOOK_S = 0.1


class RemoteStep:
    """A step whose result comes from another rank (`StepHandle`)."""

    def __init__(self, step: int, own: RunningStep, results: ResultReceiver) -> None:
        self._step = step
        self._own = own
        self._results = results

    def result(self) -> StepResult:
        """Waits for that rank's result; raises what this rank's part raised. Once only, in the order of the steps."""
        while True:
            result = self._results.receive(_LOOK_S)
            if result is not None:
                assert result.step == self._step, f"result of step {result.step} where {self._step} was due"
                self._own.result()  # its thread may be a moment behind
                return result
            if self._own.has_failed:
                self._own.result()


class GroupExecutor:
    """Owns the lead's runner, its groups and its links to the other ranks (`Executor`)."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        self._steps = ranks.open_step_sender()
        self._results = ranks.open_result_receiver()

    def submit(self, batch: StepBatch) -> StepHandle:
        """Starts a step on every rank and returns at once. Raises `ProtocolError` when a rank does not take it."""
        self._steps.send(batch)
        own = self._runner.submit(batch)
        return own if self._results is None else RemoteStep(batch.step, own, self._results)

    def close(self) -> None:
        """Ends the other ranks, after the steps under way, and this one's part."""
        self._steps.close()
        self._runner.close()
        if self._results is not None:
            self._results.close()
        self._ranks.groups.close()
