"""`sonar chat` through a pipe and as a conversation."""

from __future__ import annotations

import io

import httpx
import pytest

from launcher.cli.chat import Conversation
from launcher.cli.main import main
from sonar.errors import SonarError

from .fake_server import FakeServer


def test_a_pipe_is_one_message_and_only_the_answer_is_printed(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert main(["chat", "--url", fake_server.url, "--temperature", "0", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "Hello there, friend\n"
    (body,) = fake_server.bodies
    assert body["model"] == "tiny" and body["temperature"] == 0.0 and "seed" not in body
    assert [m["content"] for m in body["messages"]] == ["Be brief.", "two\nlines"]


def conversation_with(server: FakeServer) -> Conversation:
    return Conversation(httpx.Client(base_url=server.url), "tiny")


def test_history_is_sent_and_reset_forgets_it(fake_server: FakeServer) -> None:
    conversation = conversation_with(fake_server)
    assert "".join(conversation.ask("first")) == "Hello there, friend"
    list(conversation.ask("second"))
    assert [m["content"] for m in fake_server.bodies[1]["messages"]] == ["first", "Hello there, friend", "second"]
    conversation.reset()
    list(conversation.ask("third"))
    assert [m["content"] for m in fake_server.bodies[2]["messages"]] == ["third"]


def test_a_stopped_answer_stays_in_the_history(fake_server: FakeServer) -> None:
    conversation = conversation_with(fake_server)
    answer = conversation.ask("first")
    assert next(answer) == "Hello"
    answer.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [("status", "queue full"), ("error_event", "replica lost"), ("cut", "connection")],
)
def test_a_failed_question_can_be_asked_again(fake_server: FakeServer, fault: str, words: str) -> None:
    conversation = conversation_with(fake_server)
    fake_server.fault = fault
    with pytest.raises(SonarError, match=words):
        list(conversation.ask("first"))
    fake_server.fault = ""
    assert "".join(conversation.ask("first")) == "Hello there, friend"
    assert len(fake_server.bodies[-1]["messages"]) == 1


def test_no_server_and_no_key_are_one_line_with_a_remedy(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    monkeypatch.delenv("SONAR_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert "sonar serve" in capsys.readouterr().err
    fake_server.api_key = "secret"
    assert main(["chat", "--url", fake_server.url]) == 2
    assert "SONAR_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("SONAR_API_KEY", "secret")
    assert main(["chat", "--url", fake_server.url]) == 0


def test_a_port_names_a_server_on_this_machine(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    monkeypatch.setenv("SONAR_URL", "http://127.0.0.1:9")
    assert main(["chat", "--port", fake_server.url.rpartition(":")[2]]) == 0
    assert capsys.readouterr().out == "Hello there, friend\n"
    with pytest.raises(SystemExit):
        main(["chat", "--port", "1", "--url", fake_server.url])
    assert "not allowed with" in capsys.readouterr().err
