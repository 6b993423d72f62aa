"""Writers of /v1/completions: the whole object, and its chunks. Knows no sockets and no request parsing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.api.choice import Choice, Piece
from cluster.api.logprobs import CompletionLogprobs, prompt_entries
from cluster.api.schemas import StreamOptions
from cluster.api.writers import ChunkFrame, ResponseHead, best_of, encode_json, usage
from sonar.tokenizer import Tokenizer


@dataclass(frozen=True)
class CompletionOptions:
    """How completions are shown.

    Attributes:
        num_shown: choices a prompt (n, of best_of).
        logprobs: alternatives a token, None when not asked for.
        prompt_logprobs: whether to show `prompt_logprobs`.
        echo: per prompt the text to show before the output; empty without echo.
        drop_output: max_tokens was 0: the one token that was computed is not shown.
        skip_special_tokens: whether the output's text leaves them out.
    """

    num_shown: int = 1
    logprobs: int | None = None
    prompt_logprobs: bool = False
    echo: tuple[str, ...] = ()
    drop_output: bool = False
    skip_special_tokens: bool = True


class _ChoiceRows:
    """Text and logprobs of one choice, piece by piece, the echoed prompt first."""

    def __init__(self, tokenizer: Tokenizer, options: CompletionOptions) -> None:
        self._options = options
        self._logprobs = None
        if options.logprobs is not None:
            self._logprobs = CompletionLogprobs(tokenizer, options.logprobs, options.skip_special_tokens)
        self._begun = False

    def add(self, choice: Choice, piece: Piece) -> tuple[str, list[dict[str, list[Any]]]]:
        """What a piece adds to show: text, and logprobs objects to be joined."""
        options = self._options
        text, rows = "", []
        if not self._begun and options.echo:
            text = options.echo[choice.prompt_index]
            if self._logprobs is not None:
                rows.append(self._logprobs.prompt_rows(choice.request.prompt_token_ids, choice.prompt_logprobs, text))
        self._begun = True
        if not options.drop_output:
            text += piece.text
            if self._logprobs is not None and piece.logprobs:
                rows.append(self._logprobs.rows(piece.token_ids, piece.logprobs))
        return text, rows


def _joined(rows: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for row in rows for item in row[name]] for name in names}


class CompletionWriter:
    """The object of a request that does not stream."""

    streams = False

    def __init__(
        self, head: ResponseHead, tokenizer: Tokenizer, choices: Sequence[Choice], options: CompletionOptions
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._choices = choices
        self._options = options
        self._rows = [_ChoiceRows(tokenizer, options) for _ in choices]
        self._texts: list[list[str]] = [[] for _ in choices]
        self._logprobs: list[list[dict[str, list[Any]]]] = [[] for _ in choices]

    def update(self, choice: Choice, piece: Piece) -> bytes:
        """Keep the piece."""
        text, rows = self._rows[choice.index].add(choice, piece)
        self._texts[choice.index].append(text)
        self._logprobs[choice.index] += rows
        return b""

    def end(self) -> bytes:
        """The body."""
        shown = best_of(self._choices, self._options.num_shown)
        return encode_json(
            {
                "id": self._head.response_id,
                "object": "text_completion",
                "created": self._head.created_unix_s,
                "model": self._head.model,
                "choices": [self._choice(index, choice) for index, choice in enumerate(shown)],
                "usage": usage(self._choices, count_output=not self._options.drop_output),
            }
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        options = self._options
        shown: dict[str, Any] = {
            "index": index,
            "text": "".join(self._texts[choice.index]),
            "logprobs": None if options.logprobs is None else _joined(self._logprobs[choice.index]),
            "finish_reason": choice.finish.value if choice.finish else None,
            "stop_reason": choice.stop_reason,
        }
        if options.prompt_logprobs:
            shown["prompt_logprobs"] = prompt_entries(self._tokenizer, choice.prompt_logprobs)
        return shown


class CompletionChunkWriter:
    """The SSE chunks of a streaming request."""

    streams = True

    def __init__(
        self,
        head: ResponseHead,
        tokenizer: Tokenizer,
        choices: Sequence[Choice],
        options: CompletionOptions,
        stream_options: StreamOptions,
    ) -> None:
        self._frame = ChunkFrame(head, "text_completion", choices, stream_options, count_output=not options.drop_output)
        self._rows = [_ChoiceRows(tokenizer, options) for _ in choices]
        self._opening = [self._frame.opening + b'{"index":%d,"text":' % choice.index for choice in choices]

    def update(self, choice: Choice, piece: Piece) -> bytes:
        """Chunks for a piece; the finish reason comes after the last."""
        text, rows = self._rows[choice.index].add(choice, piece)
        chunks = b""
        if text or rows:
            logprobs = encode_json(_joined(rows)) if rows else b"null"
            chunks = self._chunk(choice.index, encode_json(text), logprobs)
        if piece.finish is not None:
            reason = b'"%b","stop_reason":%b' % (piece.finish.value.encode(), encode_json(choice.stop_reason))
            chunks += self._chunk(choice.index, b'""', b"null", reason)
        return chunks

    def _chunk(self, index: int, text: bytes, logprobs: bytes, finish: bytes = b"null") -> bytes:
        closing = self._frame.closing()
        return b'%b%b,"logprobs":%b,"finish_reason":%b}%b' % (self._opening[index], text, logprobs, finish, closing)

    def end(self) -> bytes:
        """The usage chunk if asked for, then the end mark."""
        return self._frame.end()
