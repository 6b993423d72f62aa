"""What every writer of an answer shares: the contract, the usage object, the frame of an SSE chunk.

A writer turns pieces into response bytes and knows nothing of sockets; `answer` sends what it returns. The two forms of
each endpoint are in `chat_format` and `completion_format`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from cluster.api.choice import Choice, Piece
from cluster.api.schemas import StreamOptions

encode_json = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


class Writer(Protocol):
    """Turns the pieces of an HTTP request's choices into its response body.

    streams: whether the body is SSE; if not, only `end` returns bytes, the whole body."""

    streams: bool

    def update(self, choice: Choice, piece: Piece) -> bytes:
        """Bytes to send for a piece; maybe none."""
        ...

    def end(self) -> bytes:
        """The rest, when every choice is finished."""
        ...


@dataclass(frozen=True)
class ResponseHead:
    """What every chunk repeats."""

    response_id: str
    created_unix_s: int
    model: str


def usage(choices: Sequence[Choice], *, count_output: bool = True) -> dict[str, Any]:
    """OpenAI's usage object. A prompt counts once however many choices continue it, and its cached tokens are those
    its first choice found. count_output: false for max_tokens=0, where the one computed token is thrown away."""
    firsts = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    prompt_tokens = sum(len(choice.request.prompt_token_ids) for choice in firsts)
    completion_tokens = sum(choice.num_tokens for choice in choices) if count_output else 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
    }


def best_of(choices: Sequence[Choice], num_shown: int) -> list[Choice]:
    """Of each prompt's choices the `num_shown` of highest summed logprob, best first; all, in order, when all show."""
    by_prompt: dict[int, list[Choice]] = {}
    for choice in choices:
        by_prompt.setdefault(choice.prompt_index, []).append(choice)
    shown = []
    for group in by_prompt.values():
        if num_shown < len(group):
            group = sorted(group, key=lambda choice: -choice.cumulative_logprob)
        shown += group[:num_shown]
    return shown


class ChunkFrame:
    """Bytes around the choices of an SSE chunk, made once a response: per token only the text is encoded.

    Args:
        kind: the chunk's `object`.
        count_output: see `usage`.
    """

    def __init__(
        self,
        head: ResponseHead,
        kind: str,
        choices: Sequence[Choice],
        options: StreamOptions,
        *,
        count_output: bool = True,
    ) -> None:
        self._choices = choices
        self._count_output = count_output
        self._include_usage = bool(options.include_usage)
        self._continuous = bool(options.continuous_usage_stats)
        fields = {"id": head.response_id, "object": kind, "created": head.created_unix_s, "model": head.model}
        self.opening = b"data: " + encode_json(fields)[:-1] + b',"choices":['
        self._constant_close = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def closing(self) -> bytes:
        """Ends a chunk, with the usage so far when it was asked for in every chunk."""
        if self._continuous:
            return b'],"usage":' + self._usage() + b"}\n\n"
        return self._constant_close

    def end(self) -> bytes:
        """The usage chunk, if asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        return self.opening + b'],"usage":' + self._usage() + b"}\n\n" + DONE

    def _usage(self) -> bytes:
        return encode_json(usage(self._choices, count_output=self._count_output))
