"""docs/api.md names what there is: every field, route, error code and metric."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from cluster.api.app import create_app
from cluster.api.fields import INERT
from cluster.api.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cluster.api.settings import ApiSettings
from tests.api.fakes import FakeGateway, byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/api.md").read_text(encoding="utf-8")
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
    assert {metric.name for metric in registry.collect()} - NAMES - {
        name.removesuffix("_total") for name in NAMES
    } == set()


def test_every_error_code_is_documented() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cluster/api").glob("*.py"))
    codes = set(re.findall(r'code="([a-z_]+)"', source))
    assert len(codes) > 10
    assert codes - NAMES == set()
