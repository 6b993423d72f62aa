"""The executor of a replica with several ranks: tells the others of each step, computes the lead's part of it.

Results are the lead's own, or those of another rank that draws (the last pipeline stage's, or another data-parallel
group's), which come by a result link. An error of this rank is
raised; one of another rank ends this process from outside, for the head hears of it from that rank or its agent. Called
by the engine loop.
"""

from __future__ import annotations

import msgspec

from sonar.distributed.step_link import ResultReceiver
from sonar.messages import StepBatch, StepResult
from sonar.worker.executor import StepHandle
from sonar.worker.model_runner import ModelRunner, RunningStep
from sonar.worker.ranks import Ranks

_LOOK_S = 0.1


class RemoteStep:
    """A step with results from other ranks (`StepHandle`).

    Args:
        links: one a data-parallel group; None where the lead draws itself.
    """

    def __init__(self, step: int, own: RunningStep, links: tuple[ResultReceiver | None, ...]) -> None:
        self._step = step
        self._own = own
        self._links = links

    def result(self) -> StepResult:
        """Waits for those ranks' results; raises what this rank's part raised. Once only, in the order of the steps."""
        arrived = [None if link is None else self._receive(link) for link in self._links]
        own = self._own.result()  # its thread may be a moment behind
        first, *others = [own if result is None else result for result in arrived]
        return msgspec.structs.replace(first, others=others) if others else first

    def _receive(self, link: ResultReceiver) -> StepResult:
        while True:
            result = link.receive(_LOOK_S)
            if result is not None:
                assert result.step == self._step, f"result of step {result.step} where {self._step} was due"
                return result
            if self._own.has_failed:
                self._own.result()


class GroupExecutor:
    """Owns the lead's runner, its groups and its links to the other ranks (`Executor`)."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        self._steps = ranks.open_step_sender()
        self._results = ranks.open_result_receivers()

    def submit(self, batch: StepBatch) -> StepHandle:
        """Starts a step on every rank and returns at once. Raises `ProtocolError` when a rank does not take it."""
        self._steps.send(batch)
        own = self._runner.submit(batch)
        return RemoteStep(batch.step, own, self._results) if any(self._results) else own

    def close(self) -> None:
        """Ends the other ranks, after the steps under way, and this one's part."""
        self._steps.close()
        self._runner.close()
        for link in self._results:
            if link is not None:
                link.close()
        self._ranks.groups.close()
