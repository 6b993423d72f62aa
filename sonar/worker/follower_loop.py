"""The loop of a rank that follows: takes each step from the lead, computes its part, until the lead says it is over.

The rank that draws for a pipeline sends its results back from a thread of its own, so that waiting for one does not
keep the next step from being taken. Knows no head and no signals. Built by `sonar.engine.build_follower`, called by
`sonar.worker.follower`.
"""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue
from threading import Thread
from typing import assert_never

from sonar.distributed.step_link import ResultSender
from sonar.messages import EndOfSteps, StepBatch
from sonar.worker.model_runner import ModelRunner, RunningStep
from sonar.worker.ranks import Ranks

# How soon an error of a step is seen while no further step comes.
_LOOK_S = 0.05
_IDLE_S = 0.5


class FollowerLoop:
    """Owns the rank's runner, groups and links.

    Attributes:
        num_steps: taken from the lead.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self.num_steps = 0
        self._runner = runner
        self._ranks = ranks
        sender = ranks.open_result_sender()
        self._results = None if sender is None else _ResultThread(sender)
        self._steps = ranks.open_step_receiver()
        self._under_way: deque[RunningStep] = deque()

    def run(self) -> None:
        """Follows until the lead ends the steps. Raises what a step raises; `ProtocolError` for a broken sequence."""
        while True:
            message = self._steps.receive(_LOOK_S if self._under_way else _IDLE_S)
            match message:
                case None:
                    self._collect(self._runner.max_under_way)
                case StepBatch():
                    self._collect(self._runner.max_under_way - 1)
                    self.num_steps += 1
                    running = self._runner.submit(message)
                    self._under_way.append(running)
                    if self._results is not None:
                        self._results.put(running)
                case EndOfSteps():
                    break
                case _:
                    assert_never(message)
        self._close()

    def _collect(self, most: int) -> None:
        """Takes in steps that are done, and waits for the oldest while more than `most` are not. Raises what one
        raised."""
        if self._results is not None and self._results.error is not None:
            raise self._results.error
        while self._under_way and (self._under_way[0].is_done or len(self._under_way) > most):
            step = self._under_way.popleft()
            if self._results is None:
                step.result()  # where results are sent, that thread has it

    def _close(self) -> None:
        if self._results is not None:
            self._results.close()
        self._runner.close()
        self._steps.close()
        self._ranks.groups.close()


class _ResultThread:
    """Waits for each step's result and sends it to the lead. error: what ended it."""

    def __init__(self, sender: ResultSender) -> None:
        self.error: BaseException | None = None
        self._sender = sender
        self._queue: SimpleQueue[RunningStep | None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name="results", daemon=True)
        self._thread.start()

    def put(self, step: RunningStep) -> None:
        self._queue.put(step)

    def close(self) -> None:
        """After the results of all steps have been sent."""
        self._queue.put(None)
        self._thread.join(10.0)
        self._sender.close()

    def _loop(self) -> None:
        try:
            while (step := self._queue.get()) is not None:
                self._sender.send(step.result())
        except BaseException as error:  # noqa: BLE001 - the loop's thread raises it
            self.error = error
