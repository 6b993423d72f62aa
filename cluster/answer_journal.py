"""The journal of answers that outlive their connection, and their head: what was asked, drawn and sent.

An answer is that of one HTTP request. Its updates are written before they are sent, so that a head that is started
again knows all that any client can have seen. One SQLite file, one thread that writes it: whatever waits when the
thread looks goes into one transaction. A commit is handed to the operating system, which a killed process does not
undo; it is not synced, so a power cut may take the last seconds. Knows no HTTP and no text. Called by the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import msgspec

from cluster.journal_mirror import JournalMirror
from cluster.journal_rows import read_rows
from cluster.standby_messages import JournalRow
from sonar.errors import CapacityError, ConfigError, SonarError
from sonar.messages import TokenEvent

logger = logging.getLogger(__name__)

MAX_BATCH = 1024
CLOSE_TIMEOUT_S = 5.0
_TABLES = """
CREATE TABLE IF NOT EXISTS answers (id TEXT PRIMARY KEY, record BLOB NOT NULL, ended_unix_s REAL);
CREATE TABLE IF NOT EXISTS updates (answer TEXT NOT NULL, events BLOB NOT NULL, output BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS updates_of ON updates (answer);
"""


class JournalError(SonarError):
    """The journal cannot be read or written; the disk is full, say."""


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is made from.

    Attributes:
        owner: digest of the key it was asked with; another key's client does not find it.
        key: the client's own name for it (`Idempotency-Key`), or empty.
        route: path of the endpoint. body: its JSON, seed included. asked: digest of the body as it came.
        fingerprint: digest of what was made of the body; another one means that model or tokenizer have changed.
        max_model_len: of the model then, which output lengths were cut to.
        streams: whether its output is sent as events.
    """

    answer_id: str
    owner: str
    key: str
    route: str
    body: bytes
    asked: bytes
    fingerprint: bytes
    created_unix_s: int
    max_model_len: int
    streams: bool


class LoggedEvent(msgspec.Struct, frozen=True, array_like=True):
    """A token event of one of the answer's choices."""

    choice: int
    event: TokenEvent


class StoredAnswer(NamedTuple):
    """All that was written of an answer. outputs: the bytes made of each update, in order."""

    events: list[LoggedEvent]
    outputs: list[bytes]
    is_ended: bool


@dataclass
class _Entry:
    """What is known of an answer without reading the file. ended_unix_s: None while it is being computed."""

    record: AnswerRecord
    size_bytes: int
    ended_unix_s: float | None = None


@dataclass
class _Work:
    """Something for the thread. done: told the outcome, in its own loop; None when nobody waits."""

    function: Callable[[sqlite3.Connection], Any]
    done: asyncio.Future[Any] | None = None
    outcome: Any = None


@dataclass
class JournalCounters:
    """What metrics read. commits: transactions. updates: in all of them. failures: transactions that were lost."""

    commits: int = 0
    updates: int = 0
    failures: int = 0
    commit_seconds: float = 0.0


@dataclass(frozen=True)
class JournalLimits:
    """What is kept. kept_s: an answer, after its end. Beyond the other two, ended answers go early, oldest first."""

    kept_s: float = 600.0
    max_answers: int = 10_000
    max_bytes: int = 1 << 30


class AnswerJournal:
    """Owner of the file and its thread. Methods are called in one event loop; each of the coroutines has at most one
    call a live answer under way, which bounds the queue.

    Args:
        path: created with mode 600; None keeps everything in memory, for as long as this process lives.
        unix_clock: seconds that go on over a restart.

    Attributes:
        mirror: of a head that others stand by for: what is written here is written there before it counts as written.

    Raises:
        ConfigError: the file cannot be opened or is no database.
    """

    def __init__(
        self,
        path: Path | None = None,
        limits: JournalLimits = JournalLimits(),
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.counters = JournalCounters()
        self.mirror: JournalMirror | None = None
        self._limits = limits
        self._unix_clock = unix_clock
        self._encoder = msgspec.msgpack.Encoder()
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[tuple[str, str], str] = {}
        self._size_bytes = 0
        self._connection = open_journal(path)
        self._load()
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: Thread | None = None  # begins with the first work: many servers never have any

    @property
    def num_answers(self) -> int:
        """Open ones and those that are kept."""
        return len(self._entries)

    def find(self, owner: str, answer_id: str) -> AnswerRecord | None:
        """An owner's answer; None when there is none, or none any more."""
        entry = self._entries.get(answer_id)
        return entry.record if entry is not None and entry.record.owner == owner else None

    def find_key(self, owner: str, key: str) -> AnswerRecord | None:
        """The same by the name that the client gave it."""
        return self.find(owner, self._by_key.get((owner, key), ""))

    def open_records(self) -> list[AnswerRecord]:
        """Answers that have not ended, oldest first."""
        return [entry.record for entry in self._entries.values() if entry.ended_unix_s is None]

    async def begin(self, record: AnswerRecord) -> None:
        """Writes a new answer down.

        Raises:
            CapacityError: so many answers are being computed that there is no room for one more.
            JournalError: it cannot be written.
        """
        data = self._encoder.encode(record)
        if self._is_full(len(data)):
            self.prune(len(data))
        if self._is_full(len(data)):
            raise CapacityError("the journal of resumable answers is full; try again later, or ask without it")
        self._add(_Entry(record, len(data)))
        insert = "INSERT INTO answers (id, record) VALUES (?, ?)"
        try:
            await self._do(lambda connection: connection.execute(insert, (record.answer_id, data)))
        except JournalError:
            self._remove(record.answer_id)
            raise
        if self.mirror is not None:
            await self.mirror.copy(JournalRow(answer_id=record.answer_id, record=data))

    async def append(
        self, answer_id: str, events: Sequence[LoggedEvent], output: bytes, *, is_last: bool = False
    ) -> None:
        """Writes an update down; it may be sent once this returns. Nothing happens to an answer that was forgotten.

        Raises:
            JournalError: it cannot be written.
        """
        entry = self._entries.get(answer_id)
        if entry is None:
            return
        row = (answer_id, self._encoder.encode(events), output)
        ended_unix_s = self._unix_clock() if is_last else None

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO updates (answer, events, output) VALUES (?, ?, ?)", row)
            if ended_unix_s is not None:
                connection.execute("UPDATE answers SET ended_unix_s = ? WHERE id = ?", (ended_unix_s, answer_id))

        self.counters.updates += 1
        await self._do(write)
        size = len(row[1]) + len(output)
        entry.size_bytes += size
        self._size_bytes += size
        entry.ended_unix_s = ended_unix_s
        if self.mirror is not None:
            await self.mirror.copy(
                JournalRow(answer_id=answer_id, events=row[1], output=output, ended_unix_s=ended_unix_s)
            )

    async def read(self, answer_id: str) -> StoredAnswer:
        """All updates of an answer so far.

        Raises:
            JournalError: the file cannot be read.
        """
        select = "SELECT events, output FROM updates WHERE answer = ? ORDER BY rowid"
        rows = await self._do(lambda connection: connection.execute(select, (answer_id,)).fetchall())
        decoder = msgspec.msgpack.Decoder(list[LoggedEvent])
        events = [event for data, _ in rows for event in decoder.decode(data)]
        entry = self._entries.get(answer_id)
        return StoredAnswer(events, [output for _, output in rows], entry is None or entry.ended_unix_s is not None)

    def forget(self, answer_id: str) -> None:
        """Nobody can ask for it any more."""
        if self._remove(answer_id):
            self._delete(answer_id)
            if self.mirror is not None:
                self.mirror.tell(JournalRow(answer_id=answer_id, is_forgotten=True))

    async def rows(self) -> list[JournalRow]:
        """Everything that is written, for a standby.

        Raises:
            JournalError: the file cannot be read.
        """
        rows: list[JournalRow] = await self._do(read_rows)
        return rows

    def prune(self, room_bytes: int = 0) -> None:
        """Forgets answers that ended long ago, and more of them when there is no room for as many bytes."""
        now = self._unix_clock()
        for answer_id, entry in list(self._entries.items()):
            if entry.ended_unix_s is None:
                continue
            if now - entry.ended_unix_s > self._limits.kept_s or self._is_full(room_bytes):
                self.forget(answer_id)

    def _is_full(self, room_bytes: int) -> bool:
        limits = self._limits
        return len(self._entries) >= limits.max_answers or self._size_bytes + room_bytes > limits.max_bytes

    def close(self) -> None:
        """Writes what waits, and ends. Further calls are an error."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the journal's thread is still busy after %.0f s; left behind", CLOSE_TIMEOUT_S)
                return
        self._connection.close()

    # --- index ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        sizes = dict(
            self._connection.execute("SELECT answer, sum(length(events) + length(output)) FROM updates GROUP BY answer")
        )
        decoder = msgspec.msgpack.Decoder(AnswerRecord)
        select = "SELECT id, record, ended_unix_s FROM answers ORDER BY rowid"
        for answer_id, data, ended_unix_s in self._connection.execute(select).fetchall():
            try:
                record = decoder.decode(data)
            except msgspec.MsgspecError as error:
                logger.warning("answer %s of the journal is left out, it was written otherwise: %s", answer_id, error)
                continue
            self._add(_Entry(record, len(data) + sizes.get(answer_id, 0), ended_unix_s))

    def _add(self, entry: _Entry) -> None:
        record = entry.record
        self._entries[record.answer_id] = entry
        self._size_bytes += entry.size_bytes
        if record.key:
            self._by_key[record.owner, record.key] = record.answer_id

    def _remove(self, answer_id: str) -> bool:
        entry = self._entries.pop(answer_id, None)
        if entry is None:
            return False
        self._size_bytes -= entry.size_bytes
        named = (entry.record.owner, entry.record.key)
        if self._by_key.get(named) == answer_id:
            del self._by_key[named]
        return True

    def _delete(self, answer_id: str) -> None:
        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM updates WHERE answer = ?", (answer_id,))
            connection.execute("DELETE FROM answers WHERE id = ?", (answer_id,))

        self._put(_Work(delete))

    # --- thread -----------------------------------------------------------------------------------------------------

    async def _do(self, function: Callable[[sqlite3.Connection], Any]) -> Any:
        done = asyncio.get_running_loop().create_future()
        self._put(_Work(function, done))
        return await done

    def _put(self, work: _Work) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._write_forever, name="answer-journal", daemon=True)
            self._thread.start()
        self._queue.put(work)

    def _write_forever(self) -> None:
        is_open = True
        while is_open:
            batch = [self._queue.get()]
            with contextlib.suppress(Empty):
                while len(batch) < MAX_BATCH:
                    batch.append(self._queue.get_nowait())
            is_open = None not in batch
            works = [work for work in batch if work is not None]
            if works:
                self._commit(works)

    def _commit(self, works: list[_Work]) -> None:
        began_s = time.monotonic()
        error: JournalError | None = None
        try:
            self._connection.execute("BEGIN")
            for work in works:
                work.outcome = work.function(self._connection)
            self._connection.execute("COMMIT")
        except sqlite3.Error as cause:
            error = JournalError(f"the journal of answers cannot be written: {cause}")
            self.counters.failures += 1
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
        self.counters.commits += 1
        self.counters.commit_seconds += time.monotonic() - began_s
        awaited = [work for work in works if work.done is not None]
        if awaited and awaited[0].done is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                awaited[0].done.get_loop().call_soon_threadsafe(_tell, awaited, error)


def open_journal(path: Path | None) -> sqlite3.Connection:
    """The file's connection, for one thread at a time. Raises `ConfigError`: it cannot be opened or is no database."""
    try:
        if path is not None:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        # One thread at a time: this one until the writer begins, then the writer.
        connection = sqlite3.connect(
            ":memory:" if path is None else path, isolation_level=None, timeout=5.0, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.executescript(_TABLES)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"journal {path} cannot be opened: {error}; free space on a full disk, remove a damaged file, or choose "
            "another state directory",
            param="state_dir",
        ) from error
    return connection


def _tell(works: Sequence[_Work], error: JournalError | None) -> None:
    for work in works:
        if work.done is None or work.done.done():
            continue
        if error is None:
            work.done.set_result(work.outcome)
        else:
            work.done.set_exception(error)
