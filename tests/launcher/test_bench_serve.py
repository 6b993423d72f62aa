"""The load client against a small server over real sockets: what is sent, what is recorded, how failures count."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.bench.datasets import DatasetConfig, DatasetKind, make_prompts
from launcher.bench.load import Target, run_closed, run_open, send
from launcher.bench.plot import require_matplotlib
from launcher.bench.serve import ServeBenchConfig, run_serve_bench
from launcher.cli.main import main
from launcher.client.http_stream import Endpoint
from sonar.errors import ConfigError, SonarError

from .fake_server import FakeServer

PROMPTS = make_prompts(DatasetConfig(input_len=4, output_len=3), 6)


def target_of(server: FakeServer, *, chat: bool = False, timeout_s: float = 10.0, **extra: Any) -> Target:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Target(Endpoint.of(server.url, path, server.api_key or None), "tiny", chat, timeout_s, extra)


def test_a_request_says_what_it_should_and_its_record_holds_what_came(fake_server: FakeServer) -> None:
    fake_server.api_key = "secret"
    record = asyncio.run(send(target_of(fake_server, ignore_eos=True), PROMPTS[0]))
    assert record.error == ""
    assert len(record.event_times_s) == 4
    assert record.start_s <= record.event_times_s[0] <= record.event_times_s[-1] <= record.end_s
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (7, 5, 4)
    assert fake_server.bodies == [
        {
            "model": "tiny",
            "prompt": PROMPTS[0].content,
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


def test_chat_counts_no_event_without_text(fake_server: FakeServer) -> None:
    (prompt,) = make_prompts(DatasetConfig(kind=DatasetKind.WORDS), 1)
    record = asyncio.run(send(target_of(fake_server, chat=True), prompt))
    assert (record.error, len(record.event_times_s)) == ("", 4)
    assert fake_server.bodies[0]["messages"] == [{"role": "user", "content": prompt.content}]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("status", "HTTP 429"),
        ("error_event", "in stream: replica lost"),
        ("cut", "connection lost before the end"),
        ("silent", "no end within 0.2 s"),
    ],
)
def test_faults_are_told_apart(fake_server: FakeServer, fault: str, error: str) -> None:
    fake_server.fault = fault
    timeout_s = 0.2 if fault == "silent" else 10.0
    record = asyncio.run(send(target_of(fake_server, timeout_s=timeout_s), PROMPTS[0]))
    assert record.error.startswith(error)


def test_a_dead_server_is_an_error_not_an_exception() -> None:
    target = Target(Endpoint.of("http://127.0.0.1:9", "/v1/completions", None), "tiny", False, 5.0, {})
    assert asyncio.run(send(target, PROMPTS[0])).error.startswith("cannot connect")


def test_closed_loop_sends_every_prompt_once(fake_server: FakeServer) -> None:
    records = asyncio.run(run_closed(target_of(fake_server), PROMPTS, concurrency=3))
    assert len(records) == 6 and not any(r.error for r in records)
    sent = sorted(tuple(body["prompt"]) for body in fake_server.bodies)
    assert sent == sorted(tuple(p.content) for p in PROMPTS)


def test_open_loop_counts_waiting_for_a_place_as_latency(fake_server: FakeServer) -> None:
    fake_server.fault = "silent"
    begin_s = time.perf_counter()
    records = asyncio.run(run_open(target_of(fake_server, timeout_s=0.3), PROMPTS[:2], [0.0, 0.01], concurrency=1))
    assert [r.start_s - begin_s for r in records] == pytest.approx([0.0, 0.01], abs=0.25)
    assert records[1].end_s - records[1].start_s > 0.5  # its own 0.3 s after the other's


def test_a_sweep_prints_writes_and_uses_each_prompt_once(
    fake_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    config = ServeBenchConfig(
        url=fake_server.url,
        model="tiny",
        dataset=DatasetConfig(input_len=6),
        concurrencies=(1, 4),
        num_requests=5,
        json_path=str(out),
        plot_path=str(picture),
    )
    assert run_serve_bench(config) == 0
    assert "4 streams" in capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]
    assert [run["summary"]["completed"] for run in runs] == [5, 5]
    assert picture.stat().st_size > 1000
    assert len({tuple(body["prompt"]) for body in fake_server.bodies}) == 12  # 2 to warm up, 5 and 5


def test_a_failed_request_fails_the_command_and_is_shown(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ServeBenchConfig(
        url=fake_server.url, model="tiny", dataset=DatasetConfig(), rates=(200.0,), num_requests=3, num_warmup=0
    )
    fake_server.fault = "status"
    assert run_serve_bench(config) == 1
    assert "3 x HTTP 429" in capsys.readouterr().out


def test_a_server_that_refuses_the_first_request_ends_the_run_with_its_words(fake_server: FakeServer) -> None:
    fake_server.fault = "status"
    config = ServeBenchConfig(url=fake_server.url, model="tiny", dataset=DatasetConfig())
    with pytest.raises(SonarError, match="queue full"):
        run_serve_bench(config)


@pytest.mark.parametrize(
    "changes",
    [{"concurrencies": (0,)}, {"rates": (0.0,)}, {"rates": (1.0,), "concurrencies": (1, 2)}, {"chat": True}],
)
def test_contradictions_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServeBenchConfig(url="http://127.0.0.1:1", model="tiny", dataset=DatasetConfig(), **changes)


@pytest.mark.parametrize("url", ["127.0.0.1:2242", "ftp://host", "http://"])
def test_a_malformed_url_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        Endpoint.of(url, "/v1/completions", None)


def test_the_command_takes_a_port(fake_server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    port = fake_server.url.rpartition(":")[2]
    sizes = ["--input-len", "4", "--output-len", "2", "--num-requests", "2", "--num-warmup", "0"]
    assert main(["bench", "serve", "--port", port, "--concurrency", "1", *sizes]) == 0
    assert "1 stream" in capsys.readouterr().out
    assert len(fake_server.bodies) == 2


def test_a_picture_without_matplotlib_is_refused_with_a_package_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib$"):
        require_matplotlib()
