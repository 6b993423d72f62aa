"""Heads that stand by: who leads, what they copy, what they answer; each part without sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from cluster.answer_journal import AnswerJournal, AnswerRecord, LoggedEvent, open_journal
from cluster.config import ClusterConfig, NetworkConfig
from cluster.epoch import next_epoch, read_epoch
from cluster.http_server import bind_http
from cluster.journal_mirror import ACK_TIMEOUT_S, JournalMirror
from cluster.journal_rows import write_rows
from cluster.leadership import LEASE_S, Candidate, HeadAddress, announced_address, check_same_token
from cluster.standby_app import StandbyApp
from cluster.standby_messages import Acked, Follow, Rows
from cluster.store.sqlite import SqliteStore
from sonar.errors import ConfigError
from sonar.messages import TokenEvent
from sonar.transport import PeerId, PeerKind

STANDBY = PeerId(PeerKind.STANDBY, "head-b", 1)
A = HeadAddress(name="a", http="http://a:1", control="a:2")
B = HeadAddress(name="b", http="http://b:1", control="b:2")


# --- who leads ------------------------------------------------------------------------------------------------------


def test_epochs_grow_and_are_kept(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "head.db")
    assert read_epoch(store) == 0 and [next_epoch(store) for _ in range(3)] == [1, 2, 3]
    store.close()
    assert next_epoch(SqliteStore(tmp_path / "head.db")) == 4


async def test_one_leads_and_learns_that_another_does(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "head.db")
    one, two = Candidate(store, A), Candidate(store, B)
    await asyncio.wait_for(one.win(), 5)
    assert one.is_held() and one.epoch == 1 and not two._try_to_win() and two.leader == A
    waiting = asyncio.create_task(two.win())
    one.resign()
    await asyncio.wait_for(waiting, LEASE_S)
    assert two.epoch == 2 and two.is_held() and two.leader is None
    old = Candidate(store, A)
    old.epoch = 1
    await asyncio.wait_for(old.hold(), 5)
    assert not old.is_held(), "a higher epoch is there: it is deposed, and says no word more"
    store.close()


def test_heads_with_different_tokens_are_told_apart(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "head.db")
    check_same_token(store, "one")
    check_same_token(store, "one")
    with pytest.raises(ConfigError, match="is not that of the heads that used this store before"):
        check_same_token(store, "two")
    assert b"one" not in b"".join(store.items("").values())


def test_what_a_head_announces_is_what_others_can_reach(tmp_path: Path) -> None:
    with bind_http("0.0.0.0", 0) as listener:
        network = NetworkConfig("0.0.0.0", 0, "127.0.0.1", 2243)
        address = announced_address(ClusterConfig(tmp_path, network=network), listener)
        assert address.http == f"http://127.0.0.1:{listener.getsockname()[1]}" and address.control == "127.0.0.1:2243"
        with pytest.raises(ConfigError, match="control_port=0"):
            announced_address(ClusterConfig(tmp_path, network=NetworkConfig(control_port=0)), listener)


# --- copies ---------------------------------------------------------------------------------------------------------


def record(answer_id: str) -> AnswerRecord:
    return AnswerRecord(
        answer_id=answer_id,
        owner="o",
        key="",
        route="/v1/completions",
        body=b"{}",
        asked=b"",
        fingerprint=b"",
        created_unix_s=1,
        max_model_len=9,
        streams=True,
    )


def update(number: int) -> list[LoggedEvent]:
    return [LoggedEvent(0, TokenEvent(request_id="r", first=number, token_ids=[number]))]


class FakeStandby:
    """Writes what it is sent, and acknowledges it, unless it is slow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection = open_journal(path)
        self.is_slow = False
        self.mirror: JournalMirror | None = None
        self.num_rows = 0

    def receive(self, peer: PeerId, message: msgspec.Struct) -> bool:
        assert peer == STANDBY and isinstance(message, Rows) and self.mirror is not None
        write_rows(self.connection, message.rows, is_first=message.is_first)
        self.num_rows += len(message.rows)
        if not self.is_slow:
            asyncio.get_running_loop().call_soon(self.mirror.on_message, STANDBY, Acked(number=message.number))
        return True

    async def read(self, answer_id: str) -> tuple[list[int], list[bytes], bool]:
        journal = AnswerJournal(self.path)
        stored = await journal.read(answer_id)
        journal.close()
        return [event.event.token_ids[0] for event in stored.events], stored.outputs, stored.is_ended


async def test_a_standby_has_all_that_was_written_before_and_since(tmp_path: Path) -> None:
    journal, standby = AnswerJournal(tmp_path / "answers.db"), FakeStandby(tmp_path / "copy.db")
    journal.mirror = standby.mirror = JournalMirror(standby.receive, journal.rows)
    for name in ("ended", "open", "gone"):
        await journal.begin(record(name))
        await journal.append(name, update(0), b"0", is_last=name == "ended")
    journal.mirror.on_message(STANDBY, Follow())
    racing = [asyncio.create_task(journal.append("open", update(n), b"%d" % n)) for n in range(1, 20)]
    await asyncio.gather(*racing)
    while not journal.mirror.num_followers:
        await asyncio.sleep(0.01)
    await journal.append("open", update(20), b"20")
    journal.forget("gone")
    assert await standby.read("open") == (list(range(21)), [b"%d" % n for n in range(21)], False)
    assert await standby.read("ended") == ([0], [b"0"], True)
    assert (await standby.read("gone"))[0] == []
    copied = AnswerJournal(standby.path)
    assert [r.answer_id for r in copied.open_records()] == ["open"]
    copied.close()
    journal.mirror.on_message(STANDBY, Follow())  # its connection was made anew: it begins again, and has nothing twice
    await asyncio.sleep(0.1)
    assert (await standby.read("open"))[0] == list(range(21))
    journal.close()


async def test_a_slow_standby_holds_up_one_update_for_its_time_and_no_further_one(tmp_path: Path) -> None:
    journal, standby = AnswerJournal(tmp_path / "answers.db"), FakeStandby(tmp_path / "copy.db")
    journal.mirror = standby.mirror = JournalMirror(standby.receive, journal.rows)
    await journal.begin(record("a"))
    journal.mirror.on_message(STANDBY, Follow())
    while not journal.mirror.num_followers:
        await asyncio.sleep(0.01)
    standby.is_slow = True
    await asyncio.wait_for(journal.append("a", update(0), b"0"), 3 * ACK_TIMEOUT_S)
    assert journal.mirror.num_followers == 0
    before = standby.num_rows
    await asyncio.wait_for(journal.append("a", update(1), b"1"), ACK_TIMEOUT_S / 2)
    assert standby.num_rows == before
    journal.close()


# --- HTTP -----------------------------------------------------------------------------------------------------------


async def ask(leader: HeadAddress | None, method: str, path: str, **headers: str) -> httpx.Response:
    app = StandbyApp(lambda: leader, forwards=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://standby") as client:
        return await client.request(method, path, headers=headers)


async def test_a_standby_is_well_but_not_ready_and_says_who_leads() -> None:
    health, ready = await ask(A, "GET", "/health"), await ask(A, "GET", "/ready")
    assert (health.status_code, health.json()["role"]) == (200, "standby")
    assert (ready.status_code, ready.headers["sonar-leader"], ready.headers["retry-after"]) == (503, "http://a:1", "1")


@pytest.mark.parametrize("why", ["nobody leads", "the leader does not answer", "it was passed on already"])
async def test_what_cannot_be_passed_on_is_refused_with_a_time_to_come_back(why: str) -> None:
    away = msgspec.structs.replace(A, http="http://127.0.0.1:1")
    leader = {"nobody leads": None, "it was passed on already": A}.get(why, away)
    headers = {"Sonar-Forwarded": "1"} if why == "it was passed on already" else {}
    answer = await ask(leader, "GET", "/v1/models", **headers)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "head_stands_by"
