"""Hub models, from a hub of our own on loopback that answers as the real one does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from sonar.errors import ModelError
from sonar.hub_model import fetch_hub_model

COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 3_000_000,
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same once more",
    "original/params.json": b"{}",
}


class Hub(BaseHTTPRequestHandler):
    """Has the model owner/model, the gated one owner/gated, and owner/old without safetensors."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        files = {name: FILES[name] for name in FILES if "old" not in path or not name.endswith(".safetensors")}
        if path.startswith("/api/models/owner/gated"):
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        if "/revision/missing" in path:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
        if not path.startswith(("/api/models/owner/model", "/api/models/owner/old", "/owner/")):
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
        if "/tree/" in path:
            rows = [{"type": "file", "path": n, "size": len(d), "oid": _digest(d)} for n, d in files.items()]
            return self._send(200, json.dumps(rows).encode(), {}, with_body)
        if path.startswith("/api/"):
            listing = {"id": "owner/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return self._send(200, json.dumps(listing).encode(), {}, with_body)
        data = FILES[path.split(f"/{COMMIT}/")[1]]
        return self._send(200, data, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT}, with_body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data)), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_fetches_what_can_be_served_and_reports_bytes(hub: str) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = fetch_hub_model("owner/model", None, lambda *step: seen.append(step), "REMEDY", endpoint=hub)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").stat().st_size == 3_000_000
    assert seen[0] == ("fetch owner/model", 0, 0)
    assert seen[-1] == ("fetch owner/model", 3_000_002, 3_000_002)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_the_second_time_needs_no_hub(hub: str) -> None:
    folder = fetch_hub_model("owner/model", None, lambda *_: None, "REMEDY", endpoint=hub)
    again = fetch_hub_model("owner/model", None, lambda *_: None, "REMEDY", endpoint="http://127.0.0.1:9")
    assert again == folder


@pytest.mark.parametrize(
    ("name", "revision", "reason"),
    [
        ("owner/other-hub-without-it", None, "cannot be reached"),
        ("nobody/nothing", None, "no such model, or it is private"),
        ("owner/gated", None, "restricts access"),
        ("owner/model", "missing", "no revision 'missing'"),
        ("owner/old", None, "no .safetensors file"),
        ("owner/bad--name", None, "HFValidationError"),
    ],
)
def test_failures_say_why_and_what_else(hub: str, name: str, revision: str | None, reason: str) -> None:
    endpoint = "http://127.0.0.1:9" if "without-it" in name else hub
    with pytest.raises(ModelError) as raised:
        fetch_hub_model(name, revision, lambda *_: None, "REMEDY", endpoint=endpoint)
    assert reason in raised.value.message
    assert name in raised.value.message
    assert raised.value.message.endswith("REMEDY")
