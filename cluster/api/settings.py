"""Settings of the HTTP API: one frozen dataclass, checked at construction.

Knows nothing of sockets or of the process: host, port and worker settings belong to whoever runs the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from sonar.errors import ConfigError

MIB = 1024 * 1024


@dataclass(frozen=True)
class ApiSettings:
    """How the API treats its clients.

    Attributes:
        api_keys: any of them opens every route; none leaves the API open. `/health` and `/ready` never need one.
        max_body_bytes: a longer request body is refused with 413, counted while it is read.
        max_json_depth: nesting of lists and objects in a body.
        max_choices: sequences one HTTP request may start (prompts x max(n, best_of)).
        body_timeout_s: from the head of a request to the last byte of its body.
        send_timeout_s: a client that reads nothing for this long, its buffers full, is dropped and its work aborted.
        ready_interval_s: a token younger than this is proof enough for `/ready`; older, `/ready` fetches a new one.
        ready_timeout_s: how long such a probe token may take.
        retry_after_s: the Retry-After header of 429 and 503.
        tokenizer_threads: threads for long inputs; short ones are done on the event loop, which is quicker.
        inline_chars: an input of more characters goes to those threads.
        cors_origins: origins a browser page may come from, "*" for any; empty sends no CORS header.
        ignored_fields: request fields that are accepted without effect, beside OpenAI's own (docs/api.md).
        trust_request_chat_template: whether a request may bring its own `chat_template`. A template is a program: it
            runs sandboxed, but can loop for long.
        resumable_streams: whether a stream outlives its connection when its request does not say.
        resume_window_s: how long such a stream goes on while nobody reads it.
        version: what `/version` says.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 * MIB
    max_json_depth: int = 64
    max_choices: int = 512
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    ready_interval_s: float = 10.0
    ready_timeout_s: float = 5.0
    retry_after_s: int = 1
    tokenizer_threads: int = 2
    inline_chars: int = 2048
    cors_origins: tuple[str, ...] = ()
    ignored_fields: tuple[str, ...] = ()
    trust_request_chat_template: bool = False
    resumable_streams: bool = False
    resume_window_s: float = 60.0
    version: str = "0"

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_json_depth", "max_choices", "retry_after_s", "tokenizer_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; must be at least 1", param=name)
        if self.max_json_depth > 200:
            raise ConfigError(f"max_json_depth={self.max_json_depth}; at most 200", param="max_json_depth")
        for name in ("body_timeout_s", "send_timeout_s", "ready_interval_s", "ready_timeout_s", "resume_window_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}; must be above 0", param=name)
        if any(not key or key != key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("api_keys: a key is empty, not ASCII or has blanks at its ends", param="api_keys")
