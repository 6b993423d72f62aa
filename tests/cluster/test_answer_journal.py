"""The journal of answers: what is written is there for the next head, and what is kept has bounds."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from cluster.answer_journal import AnswerJournal, AnswerRecord, JournalError, JournalLimits, LoggedEvent
from sonar.errors import CapacityError, ConfigError
from sonar.messages import FinishReason, Logprob, TokenEvent


def record(answer_id: str, key: str = "", owner: str = "me") -> AnswerRecord:
    return AnswerRecord(
        answer_id=answer_id,
        owner=owner,
        key=key,
        route="/r",
        body=b"{}",
        asked=b"a",
        fingerprint=b"f",
        created_unix_s=1,
        max_model_len=9,
        streams=True,
    )


def update(first: int, finish: FinishReason | None = None) -> list[LoggedEvent]:
    event = TokenEvent(
        request_id="r", first=first, token_ids=[first * 2], finish=finish, logprobs=[[Logprob(first, -0.5, 1)]]
    )
    return [LoggedEvent(first % 2, event)]


async def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = AnswerJournal(path)
    await journal.begin(record("a", key="k"))
    await journal.begin(record("b"))
    for number in range(3):
        await journal.append("a", update(number), b"out%d" % number)
    await journal.append("b", update(0, FinishReason.STOP), b"all", is_last=True)
    await journal.append("nobody", update(0), b"x")
    journal.close()
    assert oct(path.stat().st_mode)[-3:] == "600"
    again = AnswerJournal(path)
    assert again.open_records() == [record("a", key="k")]
    assert again.find_key("me", "k") == record("a", key="k")
    assert again.find_key("other", "k") is None and again.find("other", "a") is None
    stored = await again.read("a")
    assert stored.events == [event for number in range(3) for event in update(number)]
    assert stored.outputs == [b"out0", b"out1", b"out2"] and not stored.is_ended
    ended = await again.read("b")
    assert ended.is_ended and ended.outputs == [b"all"]
    again.close()


async def test_many_appends_at_once_share_transactions() -> None:
    journal = AnswerJournal()
    await asyncio.gather(*(journal.begin(record(str(n))) for n in range(200)))
    for number in range(5):
        await asyncio.gather(*(journal.append(str(n), update(number), b"%d" % number) for n in range(200)))
    for n in range(200):
        stored = await journal.read(str(n))
        assert stored.outputs == [b"0", b"1", b"2", b"3", b"4"]
    assert journal.counters.updates == 1000
    assert journal.counters.commits < 700
    journal.close()


async def test_ended_answers_go_after_their_time_open_ones_stay() -> None:
    now = [100.0]
    journal = AnswerJournal(limits=JournalLimits(kept_s=10.0), unix_clock=lambda: now[0])
    for name in ("open", "ended"):
        await journal.begin(record(name, key=name))
    await journal.append("ended", update(0), b"x", is_last=True)
    now[0] += 9
    journal.prune()
    assert journal.num_answers == 2
    now[0] += 2
    journal.prune()
    assert journal.find("me", "ended") is None and journal.find_key("me", "ended") is None
    assert journal.find("me", "open") is not None
    assert (await journal.read("ended")).outputs == []
    journal.close()


async def test_room_is_made_by_ended_answers_alone() -> None:
    journal = AnswerJournal(limits=JournalLimits(max_answers=2))
    await journal.begin(record("a"))
    await journal.begin(record("b"))
    with pytest.raises(CapacityError, match="full"):
        await journal.begin(record("c"))
    await journal.append("a", update(0), b"x", is_last=True)
    await journal.begin(record("c"))
    assert [r.answer_id for r in journal.open_records()] == ["b", "c"]
    journal.close()


async def test_bytes_are_counted_over_a_restart_and_freed() -> None:
    journal = AnswerJournal(limits=JournalLimits(max_bytes=5000))
    await journal.begin(record("a"))
    await journal.append("a", update(0), b"x" * 4900)
    with pytest.raises(CapacityError):
        await journal.begin(record("b"))
    journal.forget("a")
    await journal.begin(record("b"))
    journal.close()


async def test_a_write_that_fails_is_said_and_the_next_one_works(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = AnswerJournal(path)
    await journal.begin(record("a"))
    other = sqlite3.connect(path)
    other.execute("DROP TABLE updates")
    other.commit()
    with pytest.raises(JournalError, match="no such table"):
        await journal.append("a", update(0), b"x")
    other.execute("CREATE TABLE updates (answer TEXT, events BLOB, output BLOB)")
    other.commit()
    await journal.append("a", update(0), b"y")
    assert (await journal.read("a")).outputs == [b"y"]
    assert journal.counters.failures == 1
    other.close()
    journal.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"something else, and long enough to be looked at" * 100)
    with pytest.raises(ConfigError, match=r"journal\.db cannot be opened"):
        AnswerJournal(path)


def _write_and_die(path: Path) -> None:
    async def main() -> None:
        journal = AnswerJournal(path)
        await journal.begin(record("a"))
        for number in range(20):
            await journal.append("a", update(number), b"%d" % number)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())


async def test_what_was_acknowledged_outlives_a_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    process = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(path,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    journal = AnswerJournal(path)
    assert (await journal.read("a")).outputs == [b"%d" % number for number in range(20)]
    journal.close()
