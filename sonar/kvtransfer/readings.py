"""The threads in which a transport's reads block, one a peer, and the readings they work off. Called by transports.

One a peer: a peer that does not answer holds up no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from sonar.kvtransfer.contract import LostReadError, ReadState, TransferError

_logger = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 5.0


class ThreadReading:
    """A read that a thread makes (`Reading`). The state is written last, so that whoever sees it sees the rest."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self.error = ""
        self.state = ReadState.UNDER_WAY
        self._copy = copy

    def run(self) -> None:
        """Copies, in the thread's place."""
        try:
            self._copy()
        except Exception as error:  # noqa: BLE001 - whatever a library raises ends this one read
            self.error = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
            self.state = ReadState.LOST if isinstance(error, LostReadError) else ReadState.FAILED
        else:
            self.state = ReadState.DONE


class ReadThread:
    """Owns one thread that makes a peer's reads, in order. A daemon: a read that never ends must not keep a process
    alive."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[ThreadReading | None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, copy: Callable[[], None]) -> ThreadReading:
        """Queues a read."""
        reading = ThreadReading(copy)
        self._queue.put(reading)
        return reading

    def end(self) -> None:
        """The thread ends after the reads queued; does not wait."""
        self._queue.put(None)

    def join(self) -> None:
        """Waits for the end; says so if it does not come in time."""
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _logger.warning("a read is still under way after %.0f s; left behind", _CLOSE_TIMEOUT_S)

    def _loop(self) -> None:
        while (reading := self._queue.get()) is not None:
            reading.run()
