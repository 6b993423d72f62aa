"""A small OpenAI-like server for the clients' tests; it streams fixed words and can misbehave on demand."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """Answers with `words`, an event each. Keeps every request's body in `bodies` and headers in `auth`.

    fault: "" | "status" (429) | "error_event" | "cut" (closes before the end) | "silent" (never answers).
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.words = ["Hello", " there", ",", " friend"]
        self.fault = ""
        self.api_key = ""
        self.bodies: list[dict[str, Any]] = []
        self.released = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what some tests do; anything else is a fault of this file."""
        if not isinstance(sys.exception(), ConnectionError):
            raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self._authorized():
            self._json(200, {"data": [{"id": "tiny"}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if not self._authorized():
            return
        if self.server.fault == "status":
            self._json(429, {"error": {"message": "queue full"}})
        elif self.server.fault == "silent":
            self.server.released.wait(20)
            self.close_connection = True
        else:
            self._stream(body, chat=self.path.startswith("/v1/chat"))

    def _authorized(self) -> bool:
        if not self.server.api_key or self.headers["Authorization"] == f"Bearer {self.server.api_key}":
            return True
        self._json(401, {"error": {"message": "wrong key"}})
        return False

    def _json(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any], chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i, word in enumerate(self.server.words):
            if self.server.fault == "error_event" and i == 2:
                self._event({"error": {"message": "replica lost"}})
            if self.server.fault == "cut" and i == 2:
                self.close_connection = True
                return
            self._event({"choices": [{"index": 0, "delta": {"content": word}} if chat else {"index": 0, "text": word}]})
        if body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, document: object) -> None:
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()
