"""The contract between the engine loop and whatever computes its steps. Torch-free.

Members: the model runner on this process's device (`sonar.worker.model_runner`), and fakes in tests.
"""

from __future__ import annotations

from typing import Protocol

from sonar.messages import StepBatch, StepResult


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Waits for the step. Raises what the step raised."""
        ...


class Executor(Protocol):
    """Computes steps in the order they are submitted; a step may be submitted before the previous one is done."""

    def submit(self, batch: StepBatch) -> StepHandle:
        """Starts a step and returns at once (at most two are under way)."""
        ...

    def close(self) -> None:
        """Ends threads and frees device memory; further calls are an error."""
        ...
