"""An answer that does not end with its connection: computed by a task of its own, written down before it is sent.

Any number of readers follow its frames from wherever each left off. A frame is one event of a stream, with its id
`<answer id>:<number>`, numbers from 1 without a gap; an answer that does not stream has one frame, its body. Knows no
sockets. Made by `live_answers`, read by `answer_reader`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import msgspec

from cluster.answer_journal import AnswerJournal, AnswerRecord, JournalError, LoggedEvent, StoredAnswer
from cluster.api.batch_writer import BatchWriter
from cluster.api.choice import Choice
from cluster.api.errors import ApiError, to_api_error
from cluster.api.generation import Update, run_choices
from cluster.api.metrics import GenerationMetrics
from cluster.api.tokenizers import TokenizerPool
from cluster.api.writers import Writer
from cluster.gateway import Gateway

logger = logging.getLogger(__name__)

_EVENT_END = b"\n\n"


@dataclass(frozen=True)
class Prepared:
    """What a request's body was made into. model: the name it is served under."""

    choices: Sequence[Choice]
    writer: Writer
    model: str

    @property
    def fingerprint(self) -> bytes:
        """Digest of all that decides the output, the model apart."""
        what = [(c.request.request_id, c.request.prompt_token_ids, c.request.sampling) for c in self.choices]
        return hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16).digest()


@dataclass(frozen=True)
class AnswerTools:
    """What computing an answer takes.

    Attributes:
        metrics: of a model, by its name. on_token: told the model's name whenever pieces come.
    """

    gateway: Gateway
    journal: AnswerJournal
    tokenizers: TokenizerPool
    metrics: Callable[[str], GenerationMetrics]
    on_token: Callable[[str], None]


class LiveAnswer:
    """Owner of an answer's frames.

    Args:
        prepare: makes the choices; for an answer of an earlier head, from its record.
        stored: what an earlier head had written of it; None for a new answer.
        now: monotonic seconds.

    Attributes:
        failure: why it has ended without frames, or without the one it should have.
        num_readers, idle_since_s: who follows it; since when nobody has.
    """

    def __init__(
        self,
        record: AnswerRecord,
        tools: AnswerTools,
        prepare: Callable[[], Awaitable[Prepared]],
        stored: StoredAnswer | None,
        now: Callable[[], float],
    ) -> None:
        self.record = record
        self.frames: list[bytes] = []
        self.failure: Exception | None = None
        self.is_ended = False
        self.num_readers = 0
        self.idle_since_s = now()
        self._tools = tools
        self._prepare = prepare
        self._stored = stored
        self._now = now
        self._news = asyncio.Event()
        for output in stored.outputs if stored is not None else ():
            self._add_frames(output)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Somebody follows it while the block lasts."""
        self.num_readers += 1
        try:
            yield
        finally:
            self.num_readers -= 1
            self.idle_since_s = self._now()

    async def news_after(self, number: int) -> None:
        """Waits until there are more than so many frames, or no more will come."""
        while len(self.frames) <= number and not self.is_ended:
            await self._news.wait()

    async def run(self) -> None:
        """Computes it to its end. Raises nothing; cancelled, it is left to the next head."""
        try:
            if self._stored is None:
                await self._begin()
            prepared = await self._prepare()
            if prepared.fingerprint != self.record.fingerprint:
                raise ApiError(500, "the model was changed while the request was open", code="generation_failed")
            writer = BatchWriter(prepared.choices, prepared.writer, self._tools.tokenizers)
            if self._stored is not None:
                restore(prepared.choices, writer, self._stored.events)
            await self._generate(prepared, writer)
        except Exception as error:  # noqa: BLE001 - each fault becomes the readers' answer; unknown ones are logged
            await self._fail(error)
        self._end()

    def cancelled(self, failure: Exception) -> None:
        """It is computed here no more; readers are told why, unless it has ended."""
        self.failure = self.failure or failure
        self._end()

    async def _begin(self) -> None:
        try:
            await self._tools.journal.begin(self.record)
        except JournalError as error:
            logger.error("%s: %s", self.record.answer_id, error)
            raise ApiError(
                503, "the journal cannot be written now; ask again without being resumable", code="journal_failed"
            ) from error

    async def _generate(self, prepared: Prepared, writer: BatchWriter) -> None:
        tools = self._tools
        choices = [choice for choice in prepared.choices if choice.finish is None]
        metrics = tools.metrics(prepared.model)
        async with aclosing(run_choices(tools.gateway, choices, metrics)) as batches:
            async for batch in batches:
                tools.on_token(prepared.model)
                output = await writer.write(batch, is_first=not self.frames)
                await self._log(batch, output, is_last=writer.num_open == 0)
                self._publish(output)

    async def _log(self, batch: Sequence[Update], output: bytes, *, is_last: bool) -> None:
        """Writes an update down. An answer that cannot be written goes on, but does not outlive this head."""
        events = [LoggedEvent(choice.index, piece.event) for choice, piece in batch if piece.event is not None]
        answer_id = self.record.answer_id
        try:
            await self._tools.journal.append(answer_id, events, output, is_last=is_last)
        except JournalError as error:
            logger.error("%s goes on without a journal: %s", answer_id, error)
            self._tools.journal.forget(answer_id)

    async def _fail(self, error: Exception) -> None:
        """Before the first frame an error has its own status, and the same request may be asked again; after it, it is
        the stream's last event, as for any stream."""
        told = to_api_error(error)
        if told.status >= 500:
            unforeseen = None if isinstance(error, ApiError) else error
            logger.error("%s failed: %s", self.record.answer_id, told, exc_info=unforeseen)
        if self.record.streams and self.frames:
            output = b"data: " + told.body() + _EVENT_END
            await self._log([], output, is_last=True)
            self._publish(output)
        else:
            self.failure = error
            self._tools.journal.forget(self.record.answer_id)

    def _end(self) -> None:
        self.is_ended = True
        self._wake()

    def _publish(self, output: bytes) -> None:
        if output:
            self._add_frames(output)
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _add_frames(self, output: bytes) -> None:
        if not output:
            return
        if not self.record.streams:
            self.frames.append(output)
            return
        prefix = b"id: %s:" % self.record.answer_id.encode()
        for event in output.split(_EVENT_END)[:-1]:  # JSON has no line break of its own
            self.frames.append(b"%b%d\n%b%b" % (prefix, len(self.frames) + 1, event, _EVENT_END))


def restore(choices: Sequence[Choice], writer: BatchWriter, events: Sequence[LoggedEvent]) -> None:
    """Brings choices and writer to where an earlier head had them, and their requests to go on from there."""
    emitted: list[list[int]] = [[] for _ in choices]
    for logged in events:
        choice = choices[logged.choice]
        emitted[logged.choice] += logged.event.token_ids
        writer.write_now([(choice, choice.feed(logged.event))])
    for choice in choices:
        choice.request = dataclasses.replace(choice.request, emitted_token_ids=emitted[choice.index])
