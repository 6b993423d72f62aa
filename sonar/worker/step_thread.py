"""The thread in which a rank's steps run, one after another.

Leaner than a pool: a step is handed over and back through two C queues, without the locks of a `Future`. Knows nothing
of what a step is. Called by the model runner, which keeps the queue short.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

_logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 60.0

T = TypeVar("T")


class RunningCall(Generic[T]):
    """A call under way. Its outcome is waited for without a deadline: a step has none of its own, and whoever watches
    over the process sees that steps stop.

    Attributes:
        error: what it raised, once it is done.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._is_done = False
        self.error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether the outcome is there."""
        return self._is_done

    def result(self) -> T:
        """Waits for the call; returns or raises what it did. Once only."""
        value, error = self._outcome.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def run(self) -> None:
        """Makes the call, in the thread's place."""
        try:
            value = self._function()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to whoever waits
            self.fail(error)
        else:
            self._is_done = True
            self._outcome.put((value, None))

    def fail(self, error: BaseException) -> None:
        """Ends the call with an error."""
        self.error = error
        self._is_done = True
        self._outcome.put((None, error))


class StepThread:
    """Owns one thread.

    Args:
        enter: called first, in the thread. What it raises, every call raises.
    """

    def __init__(self, name: str, enter: Callable[[], None]) -> None:
        self._calls: SimpleQueue[RunningCall[object] | None] = SimpleQueue()
        self._enter = enter
        # A daemon: a step that hangs must not keep a process from ending.
        self._thread = Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> RunningCall[T]:
        """Queues a call."""
        call = RunningCall(function)
        self._calls.put(call)  # type: ignore[arg-type]
        return call

    def close(self) -> None:
        """Ends the thread after the calls queued; says so in the log if it does not end in time."""
        self._calls.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _logger.error("thread %s is still busy after %.0f s; left behind", self._thread.name, _CLOSE_TIMEOUT_S)

    def _loop(self) -> None:
        entering = RunningCall(self._enter)
        entering.run()
        while (call := self._calls.get()) is not None:
            if entering.error is not None:
                call.fail(entering.error)
            else:
                call.run()
            del call  # or the last step's tensors would live until the next one comes
