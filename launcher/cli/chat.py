"""`sonar chat`: a conversation in the terminal with any OpenAI-compatible server, streamed.

On a terminal it keeps the history; /reset forgets it, /exit or Ctrl-D ends, Ctrl-C stops an answer. With a pipe the
whole input is one message and the answer alone goes to stdout. Knows nothing of engines.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from launcher.cli.client_flags import add_client_flags, auth_headers, resolve_model, server_of
from launcher.client.events import DONE, EventParser, decode_event
from sonar.errors import SonarError, UserError

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to, and how answers are drawn; absent sampling flags leave the server's defaults."""
    add_client_flags(parser)
    parser.add_argument("--system", default=None, help="system prompt")
    parser.add_argument("--temperature", type=float, default=None)
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--max-tokens", type=int, default=None)
    parser.add_argument("--seed", type=int, default=None)


@dataclass
class Conversation:
    """Owns the messages so far.

    Attributes:
        sampling: fields added to every request.
    """

    client: httpx.Client
    model: str
    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all but the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Generator[str]:
        """Pieces of the answer as they come; the exchange is kept, an answer that was cut short too.

        Raises:
            SonarError: the server refuses or ends early; the question is taken back, so that it can be asked again.
        """
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            for piece in self._stream():
                answer.append(piece)
                yield piece
        except (SonarError, httpx.HTTPError) as error:
            self.messages.pop()
            raise error if isinstance(error, SonarError) else SonarError(f"connection: {error}") from error
        except (GeneratorExit, KeyboardInterrupt):
            self._keep(answer)
            raise
        self._keep(answer)

    def _keep(self, answer: list[str]) -> None:
        self.messages.append({"role": "assistant", "content": "".join(answer)})

    def _stream(self) -> Generator[str]:
        body = {"model": self.model, "messages": self.messages, "stream": True, **self.sampling}
        parser = EventParser()
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise SonarError(_error_text(response))
            for received in response.iter_bytes():
                for data in parser.feed(received):
                    if data == DONE:
                        return
                    event = decode_event(data)
                    if event.error is not None:
                        raise SonarError(event.error.message)
                    yield from (choice.visible for choice in event.choices if choice.visible)
        raise SonarError("the stream ended before [DONE]")


def _error_text(response: httpx.Response) -> str:
    text = response.read()[:2000]
    with contextlib.suppress(msgspec.MsgspecError):
        event = decode_event(text)
        if event.error is not None:
            return event.error.message
    return f"status {response.status_code}: {text[:200].decode(errors='replace')}"


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Talks until the input ends. With a pipe an error is the exit code's; on a terminal the conversation goes on."""
    server = server_of(args, environ)
    model = resolve_model(server, args.model)
    names = ("temperature", "top_p", "max_tokens", "seed")
    sampling = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    timeout = httpx.Timeout(10.0, read=600.0)
    with httpx.Client(base_url=server.url, headers=auth_headers(server.api_key), timeout=timeout) as client:
        conversation = Conversation(client, model, args.system, sampling)
        if sys.stdin.isatty():
            _interactive(conversation)
        else:
            _one_message(conversation, sys.stdin.read().strip())
    return 0


def _one_message(conversation: Conversation, text: str) -> None:
    if not text:
        raise UserError("the input is empty; pipe a message into `sonar chat`, or run it in a terminal")
    for piece in conversation.ask(text):
        print(piece, end="", flush=True)
    print()


def _interactive(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() line editing and history

    print(f"{conversation.model}: {HELP}")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            print(HELP)
        elif text:
            _print_answer(conversation, text)


def _print_answer(conversation: Conversation, text: str) -> None:
    answer = conversation.ask(text)
    try:
        for piece in answer:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
        answer.close()
    except SonarError as error:
        print(f"error: {error}", file=sys.stderr, end="")
    print()
