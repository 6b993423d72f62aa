"""Writers of /v1/chat/completions: the whole object, and its chunks. Knows no sockets and no request parsing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.api.choice import Choice, Piece
from cluster.api.logprobs import chat_entries, prompt_entries
from cluster.api.schemas import StreamOptions
from cluster.api.writers import ChunkFrame, ResponseHead, best_of, encode_json, usage
from sonar.tokenizer import Tokenizer


class ChatWriter:
    """The object of a request that does not stream.

    Args:
        choices: every sequence computed. num_shown: of each prompt's, the best by summed logprob are shown.
        top_logprobs: alternatives a token, None when no logprobs were asked for.
    """

    streams = False

    def __init__(
        self,
        head: ResponseHead,
        tokenizer: Tokenizer,
        choices: Sequence[Choice],
        *,
        num_shown: int,
        top_logprobs: int | None,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._choices = choices
        self._num_shown = num_shown
        self._top_logprobs = top_logprobs
        self._texts: dict[int, list[str]] = {choice.index: [] for choice in choices}
        self._logprobs: dict[int, list[dict[str, Any]]] = {choice.index: [] for choice in choices}

    def update(self, choice: Choice, piece: Piece) -> bytes:
        """Keep the piece."""
        self._texts[choice.index].append(piece.text)
        if self._top_logprobs is not None:
            self._logprobs[choice.index] += chat_entries(self._tokenizer, piece, self._top_logprobs)
        return b""

    def end(self) -> bytes:
        """The body."""
        head = self._head
        shown = best_of(self._choices, self._num_shown)
        body: dict[str, Any] = {
            "id": head.response_id,
            "object": "chat.completion",
            "created": head.created_unix_s,
            "model": head.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(shown)],
            "usage": usage(self._choices),
        }
        first = shown[0]
        if first.request.sampling.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_entries(self._tokenizer, first.prompt_logprobs)
        return encode_json(body)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._top_logprobs is not None:
            logprobs = {"content": self._logprobs[choice.index], "refusal": None}
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(self._texts[choice.index]), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish.value if choice.finish else None,
            "stop_reason": choice.stop_reason,
        }


class ChatChunkWriter:
    """The SSE chunks of a streaming request."""

    streams = True

    def __init__(
        self,
        head: ResponseHead,
        tokenizer: Tokenizer,
        choices: Sequence[Choice],
        *,
        options: StreamOptions,
        top_logprobs: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._top_logprobs = top_logprobs
        self._frame = ChunkFrame(head, "chat.completion.chunk", choices, options)
        opening = self._frame.opening
        self._delta = [opening + b'{"index":%d,"delta":{' % choice.index for choice in choices]
        self._begun = [False] * len(choices)

    def update(self, choice: Choice, piece: Piece) -> bytes:
        """Chunks for a piece: the role before the first, the finish reason after the last."""
        opening = self._delta[choice.index]
        chunks = []
        if not self._begun[choice.index]:
            self._begun[choice.index] = True
            chunks.append(self._chunk(opening, b'"role":"assistant","content":""'))
        if self._top_logprobs is not None and piece.logprobs:
            entries = {"content": chat_entries(self._tokenizer, piece, self._top_logprobs), "refusal": None}
            chunks.append(self._chunk(opening, b'"content":' + encode_json(piece.text), encode_json(entries)))
        elif piece.text:
            chunks.append(self._chunk(opening, b'"content":' + encode_json(piece.text)))
        if piece.finish is not None:
            reason = b'"%b","stop_reason":%b' % (piece.finish.value.encode(), encode_json(choice.stop_reason))
            chunks.append(self._chunk(opening, b"", finish=reason))
        return b"".join(chunks)

    def _chunk(self, opening: bytes, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return b'%b%b},"logprobs":%b,"finish_reason":%b}%b' % (opening, delta, logprobs, finish, self._frame.closing())

    def end(self) -> bytes:
        """The usage chunk if asked for, then the end mark."""
        return self._frame.end()
