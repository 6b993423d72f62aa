"""The answers that outlive their connections: begun, found again, given up when nobody comes back for them.

Those that an earlier head left open go on when this one starts. Knows no sockets. Made by `app`; called by the
generating routes and by `resume_routes`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from cluster.answer_journal import AnswerRecord, JournalError
from cluster.api.errors import ApiError
from cluster.api.live_answer import AnswerTools, LiveAnswer, Prepared
from cluster.api.settings import ApiSettings
from sonar.errors import CapacityError

logger = logging.getLogger(__name__)

TICK_S = 1.0


class LiveAnswers:
    """Owner of the running answers and their tasks.

    Args:
        remake: makes the choices of an answer from its record.
        clock: monotonic seconds.

    Attributes:
        num_readmitted: answers of an earlier head that went on.
    """

    def __init__(
        self,
        tools: AnswerTools,
        settings: ApiSettings,
        remake: Callable[[AnswerRecord], Awaitable[Prepared]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_readmitted = 0
        self._tools = tools
        self._window_s = settings.resume_window_s
        self._remake = remake
        self._clock = clock
        self._live: dict[str, tuple[LiveAnswer, asyncio.Task[None]]] = {}
        self._by_key: dict[tuple[str, str], LiveAnswer] = {}
        self._group: asyncio.TaskGroup | None = None
        self._is_over = False

    @property
    def num_live(self) -> int:
        """Answers being computed."""
        return len(self._live)

    async def begin(self, group: asyncio.TaskGroup) -> None:
        """Answers of an earlier head go on from here; the group holds every task until `end`."""
        self._group = group
        journal = self._tools.journal
        journal.prune()
        for record in journal.open_records():
            try:
                stored = await journal.read(record.answer_id)
            except JournalError as error:
                logger.error("%s cannot go on: %s", record.answer_id, error)
                continue
            logger.info("%s goes on after %d updates of an earlier head", record.answer_id, len(stored.outputs))
            self.num_readmitted += 1
            self._run(LiveAnswer(record, self._tools, self._remaking(record), stored, self._clock))
        self._ticker = group.create_task(self._tick_forever())

    def end(self) -> None:
        """The server ends: what is still open is left to the next head."""
        self._is_over = True
        self._ticker.cancel()
        for _, task in self._live.values():
            task.cancel()

    def start(self, record: AnswerRecord, prepared: Prepared) -> LiveAnswer:
        """Begins a new answer."""

        async def made() -> Prepared:
            return prepared

        return self._run(LiveAnswer(record, self._tools, made, None, self._clock))

    async def find(self, owner: str, answer_id: str) -> LiveAnswer:
        """An owner's answer, still running or as it was written.

        Raises:
            ApiError: 404, there is none (any more); 503, it cannot be read.
        """
        live = self._live.get(answer_id)
        if live is not None and live[0].record.owner == owner:
            return live[0]
        record = self._tools.journal.find(owner, answer_id)
        if record is None:
            raise ApiError(
                404,
                f"no answer {answer_id[:200]!r} is kept: it was not resumable (send `Sonar-Resumable: true` when you "
                f"ask), nobody read it for {self._window_s:g} s, or it ended too long ago",
                code="stream_not_found",
            )
        try:
            stored = await self._tools.journal.read(answer_id)
        except JournalError as error:
            raise ApiError(503, "the journal of answers cannot be read", code="journal_failed") from error
        ended = LiveAnswer(record, self._tools, self._remaking(record), stored, self._clock)
        ended.is_ended = True
        return ended

    async def find_key(self, owner: str, key: str) -> LiveAnswer | None:
        """The same by the client's own name for it; None when it is new."""
        live = self._by_key.get((owner, key))
        if live is not None:
            return live
        record = self._tools.journal.find_key(owner, key)
        return None if record is None else await self.find(owner, record.answer_id)

    def give_up(self, answer: LiveAnswer) -> None:
        """Ends an answer that nobody wants, and forgets it."""
        self._tools.journal.forget(answer.record.answer_id)
        live = self._live.get(answer.record.answer_id)
        if live is not None:
            live[1].cancel()

    def _remaking(self, record: AnswerRecord) -> Callable[[], Awaitable[Prepared]]:
        return lambda: self._remake(record)

    def _run(self, answer: LiveAnswer) -> LiveAnswer:
        assert self._group is not None, "begin() comes first"
        answer_id = answer.record.answer_id
        task = self._group.create_task(answer.run(), name=f"answer {answer_id}")
        named = (answer.record.owner, answer.record.key)
        self._live[answer_id] = (answer, task)
        if answer.record.key:
            self._by_key[named] = answer

        def on_end(_: asyncio.Task[None]) -> None:
            del self._live[answer_id]
            self._by_key.pop(named, None)
            if not answer.is_ended:
                answer.cancelled(self._why_cancelled())

        task.add_done_callback(on_end)
        return answer

    def _why_cancelled(self) -> Exception:
        """A client that is told that the server ends comes back, here or at another head."""
        if self._is_over:
            return CapacityError("the server is stopping; ask again, here or at another one", code="server_stopping")
        return ApiError(410, "the answer was given up", code="stream_given_up")

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tools.journal.prune()
            now = self._clock()
            for answer, _ in list(self._live.values()):
                if not answer.num_readers and now - answer.idle_since_s > self._window_s:
                    logger.info("%s: nobody came back for it in %g s", answer.record.answer_id, self._window_s)
                    self.give_up(answer)
