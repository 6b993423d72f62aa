"""docs/api.md names what there is: every field, route, error code and metric."""

from __future__ import annotations

import re
import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from cluster.answer_journal import AnswerJournal
from cluster.api.app import create_app
from cluster.api.fields import INERT
from cluster.api.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cluster.api.settings import ApiSettings
from cluster.config import ClusterConfig
from cluster.control import ControlPlane
from cluster.metrics import HeadMetrics
from cluster.store.sqlite import SqliteStore
from sonar.transport import TransportCounters
from tests.api.conftest import Served
from tests.api.fakes import FakeGateway, byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/api.md").read_text(encoding="utf-8")
METRICS = set(re.findall(r"`(sonar_[a-z_0-9]+)`", TEXT))
NAMES = set(re.findall(r"[a-z_0-9]+", TEXT))


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_every_field_is_documented(kind: type[msgspec.Struct]) -> None:
    assert {field.name for field in msgspec.structs.fields(kind)} - NAMES == set()


def test_every_inert_field_is_documented() -> None:
    assert set() == INERT - NAMES


def test_every_route_and_metric_is_documented() -> None:
    registry = CollectorRegistry()
    app = create_app(FakeGateway(), ApiSettings(), registry=registry, load_tokenizer=lambda path: byte_tokenizer())
    paths = [path.replace("{model_id}", "{id}") for path in app.openapi()["paths"]]
    assert len(paths) >= 10
    assert [path for path in paths if f" {path}`" not in TEXT] == []
    assert names_of(registry) - METRICS == set()


def names_of(registry: CollectorRegistry) -> set[str]:
    """The families, as a scrape shows them."""
    return {f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in registry.collect()}


def test_the_metrics_of_the_head_are_documented_and_no_others(tmp_path: Path) -> None:
    server = SimpleNamespace(counters=TransportCounters())
    control = ControlPlane(ClusterConfig(tmp_path), server, SqliteStore(tmp_path / "db"), {"sonar": "1"}, lambda: 5.0)
    registry = HeadMetrics(control).registry
    with closing(AnswerJournal(tmp_path / "answers.db")) as journal:
        create_app(
            FakeGateway(), ApiSettings(), registry=registry, load_tokenizer=lambda _: byte_tokenizer(), journal=journal
        )
        assert names_of(registry) == METRICS


def test_what_is_no_http_is_answered_as_documented(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 400 ")
    assert answer.endswith("\r\n\r\nInvalid HTTP request received.")
    assert "`Invalid HTTP request received.`" in TEXT


def test_every_error_code_is_documented() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cluster/api").glob("*.py"))
    codes = set(re.findall(r'code="([a-z_]+)"', source))
    assert len(codes) > 10
    assert codes - NAMES == set()
