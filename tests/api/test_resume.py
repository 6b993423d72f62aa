"""Answers that outlive their connection, over HTTP: resumed streams are those of the unbroken run, byte for byte."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.answer_journal import AnswerJournal
from cluster.api.settings import ApiSettings
from cluster.gateway import GenerateRequest
from tests.api.conftest import Served, serve
from tests.api.fakes import FakeGateway

RESUMABLE = {"Sonar-Resumable": "true"}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "seed": 7}
TEXTS = {"model": "fake", "prompt": ["one", "two"], "seed": 7}
# Every shape whose numbers could go wrong: several choices, logprobs, usage in each chunk, stop strings, eos.
SHAPES = [
    ("/v1/chat/completions", {**CHAT, "max_tokens": 30}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 20, "n": 3, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 50, "stop": ["lazy"]}),
    ("/v1/completions", {**TEXTS, "max_tokens": 15, "n": 2, "logprobs": 1, "echo": True}),
]
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def frames_of(text: str) -> list[tuple[int, str]]:
    """Number and data of each event; every one carries an id of the same stream."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    found = [re.fullmatch(r"id: ([^:\n]+):(\d+)\ndata: (.*)", block) for block in blocks]
    assert all(found)
    assert len({match[1] for match in found if match}) <= 1
    return [(int(match[2]), match[3]) for match in found if match]


def without_names(frames: list[tuple[int, str]]) -> list[tuple[int, Any]]:
    """Frames without the id and time of their request, which differ from run to run."""
    decoded: list[tuple[int, Any]] = [(n, data if data == "[DONE]" else json.loads(data)) for n, data in frames]
    return [(n, d if d == "[DONE]" else {k: v for k, v in d.items() if k not in ("id", "created")}) for n, d in decoded]


def take(client: httpx.Client, path: str, body: dict[str, Any], count: int, **headers: str) -> list[tuple[int, str]]:
    """Reads so many events of a stream, then goes away."""
    text = ""
    with client.stream("POST", path, json=body, headers={**RESUMABLE, **headers}) as response:
        assert response.status_code == 200, response.read()
        for chunk in response.iter_text():
            text += chunk
            if text.count("\n\n") >= count:
                break
    return frames_of("".join(block + "\n\n" for block in text.split("\n\n")[:count]))


def stream_id(frames: list[tuple[int, str]]) -> str:
    return str(json.loads(frames[0][1])["id"])


@pytest.fixture
def slow() -> Iterator[Served]:
    """A server whose tokens take a while."""
    with serve(FakeGateway(delay_s=0.003, eos_after=200, num_cached=1), ApiSettings(resume_window_s=0.5)) as running:
        yield running


@pytest.mark.parametrize(("path", "body"), SHAPES)
@pytest.mark.parametrize("way", ["post", "get", "after"])
def test_a_resumed_stream_is_the_unbroken_one(slow: Served, path: str, body: dict[str, Any], way: str) -> None:
    body = {**body, **USAGE, "stream": True}
    with slow.client() as client:
        whole = frames_of(client.post(path, json=body, headers=RESUMABLE).text)
        assert [number for number, _ in whole] == list(range(1, len(whole) + 1))
        assert whole[-1][1] == "[DONE]"
        seen = take(client, path, body, 5)
        name = stream_id(seen)
        for _ in range(2):  # goes away twice
            last = f"{name}:{len(seen)}"
            if way == "post":
                seen += take(client, path, body, 6, **{"Last-Event-ID": last})
            else:
                query, headers = ({}, {"Last-Event-ID": last}) if way == "get" else ({"after": str(len(seen))}, {})
                with client.stream("GET", f"/v1/streams/{name}", params=query, headers=headers) as response:
                    text = ""
                    for chunk in response.iter_text():
                        text += chunk
                        if "\n\n" in text:
                            break
                seen += frames_of(text[: text.rindex("\n\n") + 2])
        seen += frames_of(client.get(f"/v1/streams/{name}", params={"after": str(len(seen))}).text)
        n_whole, n_seen = without_names(whole), without_names(seen)
        if "n" not in body and isinstance(body.get("prompt"), type(None)):
            assert n_seen == n_whole
        # Several choices are interleaved as they come; each is equal by itself, and the numbers have no gap.
        assert [number for number, _ in n_seen] == list(range(1, len(seen) + 1))
        assert by_choice(n_seen) == by_choice(n_whole)
        assert n_seen[-2:] == n_whole[-2:], "the usage"
        assert frames_of(client.get(f"/v1/streams/{name}").text) == seen, "asked again from the start"
    slow.wait_idle()


def by_choice(frames: list[tuple[int, Any]]) -> dict[int, list[Any]]:
    """The choices' events, each choice's in its order."""
    found: dict[int, list[Any]] = {}
    for _, data in frames:
        for choice in data["choices"] if data != "[DONE]" else ():
            found.setdefault(choice["index"], []).append(choice)
    return found


@pytest.mark.parametrize(("path", "body"), SHAPES)
def test_the_next_head_goes_on_where_the_last_one_was_killed(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    """The first server is stopped in the middle; what it leaves in the file is all that the second one knows."""
    body = {**body, **USAGE}
    if "stop" not in body:  # where its text ends depends on the seed
        del body["seed"]  # the journal knows the one that was drawn
    settings = ApiSettings()
    journal = AnswerJournal(tmp_path / "journal.db")
    with serve(FakeGateway(delay_s=0.005), settings, journal) as running, running.client() as client:
        seen = take(client, path, body, 9)
        running.gateway.delay_s = 60  # no further token before its end
        seeds = [request.sampling.seed for request in running.gateway.requests]
    journal.close()
    name = stream_id(seen)
    again = AnswerJournal(tmp_path / "journal.db")
    assert [record.answer_id for record in again.open_records()] == [name]
    gateway = FakeGateway(delay_s=0.002, num_cached=77, ready=False)
    with serve(gateway, settings, again) as running, running.client() as client:
        seen += take(client, path, body, 4, **{"Last-Event-ID": f"{name}:{len(seen)}"})
        seen += frames_of(client.get(f"/v1/streams/{name}", headers={"Last-Event-ID": f"{name}:{len(seen)}"}).text)
        assert [request.sampling.seed for request in gateway.requests] == seeds
        assert all(request.emitted_token_ids for request in gateway.requests)
        running.wait_idle()
        assert running.metric("sonar_answers_readmitted_total") == 1
    again.close()
    with serve(FakeGateway(), settings) as running, running.client() as client:
        pinned = {**body, "seed": seeds[0]}
        whole = frames_of(client.post(path, json=pinned, headers=RESUMABLE).text)
    assert [number for number, _ in seen] == list(range(1, len(seen) + 1))
    if "n" not in body:
        assert without_names(seen) == without_names(whole)
    assert by_choice(without_names(seen)) == by_choice(without_names(whole))
    assert without_names(seen)[-2:] == without_names(whole)[-2:]


def test_a_stream_that_did_not_ask_has_no_ids_and_ends_with_its_connection(slow: Served) -> None:
    body = {**CHAT, "stream": True, "max_tokens": 500}
    with slow.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            first = next(response.iter_text())
        assert "id: " not in first
        slow.wait_idle()
        name = json.loads(first.split("\n\n")[0].removeprefix("data: "))["id"]
        assert client.get(f"/v1/streams/{name}").json()["error"]["code"] == "stream_not_found"


def test_a_server_may_keep_all_streams_and_a_client_may_say_no() -> None:
    settings = ApiSettings(resumable_streams=True)
    with serve(FakeGateway(), settings) as running, running.client() as client:
        body = {**CHAT, "stream": True, "max_tokens": 3}
        assert frames_of(client.post("/v1/chat/completions", json=body).text)
        no = client.post("/v1/chat/completions", json=body, headers={"Sonar-Resumable": "false"})
        assert "id: " not in no.text


def test_nobody_comes_back_in_time(slow: Served) -> None:
    body = {**CHAT, "stream": True, "max_tokens": 2000}
    slow.gateway.eos_after = None
    with slow.client() as client:
        name = stream_id(take(client, "/v1/chat/completions", body, 3))
        assert slow.gateway.open_ids
        slow.wait_idle()
        assert client.get(f"/v1/streams/{name}").status_code == 404
    assert slow.metric("sonar_journal_answers") == 0


def test_a_stream_is_ended_by_its_client(slow: Served) -> None:
    slow.gateway.eos_after = None
    with slow.client() as client:
        name = stream_id(take(client, "/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": 2000}, 3))
        assert client.delete(f"/v1/streams/{name}").status_code == 204
        slow.wait_idle()
        assert client.delete(f"/v1/streams/{name}").status_code == 404


def test_an_idempotency_key_computes_once(slow: Served) -> None:
    body = {**CHAT, "max_tokens": 40, "n": 2, "logprobs": True}
    del body["seed"]
    keyed = {"Idempotency-Key": "order-1"}
    with slow.client() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body, headers=keyed, timeout=0.05)
        first = client.post("/v1/chat/completions", json=body, headers=keyed)
        second = client.post("/v1/chat/completions", json=body, headers=keyed)
        assert first.status_code == 200 and first.content == second.content
        assert first.json()["usage"]["completion_tokens"] == 80
        assert len(slow.gateway.requests) == 2, "two choices, once"
        other = client.post("/v1/chat/completions", json={**body, "n": 1}, headers=keyed)
        assert other.status_code == 422 and other.json()["error"]["code"] == "different_request"
        third = client.post("/v1/chat/completions", json=body, headers={"Idempotency-Key": "order-2"})
        assert third.json()["id"] != first.json()["id"]


def test_an_idempotency_key_goes_on_at_the_next_head(tmp_path: Path) -> None:
    body = {**TEXTS, "max_tokens": 25, "prompt_logprobs": 1, "best_of": 3, "n": 2}
    keyed = {"Idempotency-Key": "k"}
    journal = AnswerJournal(tmp_path / "journal.db")
    with serve(FakeGateway(delay_s=0.01), ApiSettings(), journal) as running, running.client() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, headers=keyed, timeout=0.1)
        deadline = time.monotonic() + 5
        while not journal.counters.updates > 6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.gateway.delay_s = 60
    journal.close()
    again = AnswerJournal(tmp_path / "journal.db")
    with serve(FakeGateway(), ApiSettings(), again) as running, running.client() as client:
        answer = client.post("/v1/completions", json=body, headers=keyed).json()
        assert all(request.emitted_token_ids for request in running.gateway.requests)
        whole = client.post("/v1/completions", json=body).json()
        assert len(running.gateway.requests) == 12
    again.close()
    for one in (answer, whole):
        del one["id"], one["created"]
    assert answer == whole


def test_errors_before_the_first_token_are_not_kept(slow: Served) -> None:
    slow.gateway.queue_size = 0
    keyed = {"Idempotency-Key": "k"}
    with slow.client() as client:
        assert client.post("/v1/chat/completions", json=CHAT, headers=keyed).status_code == 429
        slow.gateway.queue_size = 10
        assert client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}, headers=keyed).status_code == 200


def test_an_error_after_the_first_token_is_the_last_event_for_every_reader(slow: Served) -> None:
    slow.gateway.fail = lambda request, number: "the replica is gone" if number == 5 else None
    body = {**CHAT, "stream": True, "max_tokens": 20}
    with slow.client() as client:
        frames = frames_of(client.post("/v1/chat/completions", json=body, headers=RESUMABLE).text)
        assert json.loads(frames[-1][1])["error"]["code"] == "generation_failed"
        assert frames_of(client.get(f"/v1/streams/{stream_id(frames)}", params={"after": "4"}).text) == frames[4:]


def test_a_journal_that_cannot_be_written_ends_no_stream(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = AnswerJournal(path)
    gateway = FakeGateway(delay_s=0.002)
    body = {**CHAT, "stream": True, "max_tokens": 30}
    with serve(gateway, ApiSettings(), journal) as running, running.client() as client:

        def break_it(request: GenerateRequest, number: int) -> None:
            if number == 10:
                with sqlite3.connect(path) as other:
                    other.execute("DROP TABLE IF EXISTS updates")
                    other.execute("DROP TABLE IF EXISTS answers")

        gateway.fail = break_it
        frames = frames_of(client.post("/v1/chat/completions", json=body, headers=RESUMABLE).text)
        assert frames[-1] == (len(frames), "[DONE]")
        assert client.get(f"/v1/streams/{stream_id(frames)}").status_code == 404, "it is not there any more"
        refused = client.post("/v1/chat/completions", json=body, headers=RESUMABLE)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "journal_failed"
        assert client.post("/v1/chat/completions", json=body).text.endswith("data: [DONE]\n\n")
        assert running.metric("sonar_journal_failures_total") >= 2
    journal.close()


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"Sonar-Resumable": "maybe"}, "Sonar-Resumable"),
        ({"Sonar-Resumable": "true"}, "Sonar-Resumable"),
        ({"Last-Event-ID": "17"}, "Last-Event-ID"),
        ({"Last-Event-ID": "x:-1"}, "Last-Event-ID"),
        ({"Idempotency-Key": "k" * 256}, "Idempotency-Key"),
    ],
)
def test_wrong_headers_are_named(served: Served, headers: dict[str, str], param: str) -> None:
    with served.client() as client:
        response = client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_wrong_numbers_are_named(served: Served) -> None:
    body = {**CHAT, "stream": True, "max_tokens": 3}
    with served.client() as client:
        name = stream_id(frames_of(client.post("/v1/chat/completions", json=body, headers=RESUMABLE).text))
        for after in ("-1", "x", "99"):
            assert client.get(f"/v1/streams/{name}", params={"after": after}).status_code == 400
        wrong = client.get(f"/v1/streams/{name}", headers={"Last-Event-ID": "other:1"})
        assert wrong.status_code == 400
        assert client.post("/v1/completions", json=TEXTS, headers={"Last-Event-ID": f"{name}:1"}).status_code == 422


def test_another_keys_client_does_not_find_it() -> None:
    settings = ApiSettings(api_keys=("a", "b"))
    body = {**CHAT, "stream": True, "max_tokens": 3}
    mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    with serve(FakeGateway(), settings) as running, running.client() as client:
        frames = frames_of(client.post("/v1/chat/completions", json=body, headers={**RESUMABLE, **mine}).text)
        path = f"/v1/streams/{stream_id(frames)}"
        assert client.get(path, headers=other).status_code == 404
        assert frames_of(client.get(path, headers=mine).text) == frames
        assert client.get(path).status_code == 401
