"""What offline generation returns, and how token events become it. Torch-free; knows nothing of engines.

Called by `sonar.llm`. The HTTP API has its own forms, which follow OpenAI's.
"""

from __future__ import annotations

from dataclasses import dataclass

from sonar.messages import FinishReason, Logprob, TokenEvent
from sonar.sampling_params import SamplingParams
from sonar.tokenizer.output_text import OutputText


@dataclass(frozen=True)
class Usage:
    """Tokens of a request. prompt: counted once for all its sequences. cached: prompt tokens of the first sequence that
    came from the prefix cache. completion: of all sequences."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class CompletionOutput:
    """One sequence.

    Attributes:
        index: among the request's n sequences.
        text: without the stop string or stop token, unless `include_stop_in_output` asks for it.
        token_ids: all that were drawn, the stop token included; up to the one that completed a stop string.
        logprobs: per token, the drawn one first, then the alternatives; empty when not asked.
        finish_reason: STOP by eos, stop id or stop string; LENGTH.
        stop_reason: the stop string or stop id.
        seed: with which this sequence alone can be drawn again.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[Logprob]]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int


@dataclass(frozen=True)
class RequestOutput:
    """Everything of one prompt.

    Attributes:
        prompt: as given, or as the chat template wrote it; None when token ids were given.
        prompt_logprobs: per prompt token from the second on; empty when not asked.
        outputs: n sequences.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[list[Logprob]]
    outputs: list[CompletionOutput]
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.outputs[0].text


@dataclass(frozen=True)
class StreamUpdate:
    """What a step added to one sequence.

    Attributes:
        prompt_index: of the prompt in the call. index: of the sequence.
        text: to append; may lag behind the tokens by half a character or the beginning of a stop string.
        token_ids, logprobs: new ones.
        finish_reason: set in the sequence's last update. stop_reason: as in `CompletionOutput`.
        error: why the engine could not go on, when finish_reason is ERROR.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[Logprob]]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: str = ""


class SequenceCollector:
    """Owner of what one sequence has produced so far.

    Args:
        prompt_index, index: numbers of prompt and sequence. sampling: of this sequence: n is 1, the seed is set.
        text: its detokenizer.

    Attributes:
        num_cached_tokens, prompt_logprobs: of the prompt, once the first event is in.
    """

    def __init__(self, prompt_index: int, index: int, sampling: SamplingParams, text: OutputText) -> None:
        self.prompt_index = prompt_index
        self.index = index
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[list[Logprob]] = []
        self._sampling = sampling
        self._detokenizer = text
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[list[Logprob]] = []
        self._finish: FinishReason | None = None
        self._stop_reason: str | int | None = None

    def take(self, event: TokenEvent) -> StreamUpdate:
        """Adds an event. When a stop string ends the text here, the engine has yet to be told (`event.finish` is None
        and the update's is not)."""
        assert self._finish is None, f"an event after the last one of sequence {self.prompt_index}.{self.index}"
        assert event.first == len(self._token_ids), f"token {event.first} after {len(self._token_ids)}"
        if event.num_cached_tokens >= 0:
            self.num_cached_tokens = event.num_cached_tokens
            self.prompt_logprobs = event.prompt_logprobs
        delta = self._detokenizer.push(
            event.token_ids, is_last=event.finish is not None, stop_token_id=event.stop_token_id
        )
        token_ids, logprobs = event.token_ids[: delta.num_tokens], event.logprobs[: delta.num_tokens]
        self._finish, self._stop_reason = event.finish, event.stop_token_id
        if delta.stop is not None:
            self._finish, self._stop_reason = FinishReason.STOP, delta.stop
        self._pieces.append(delta.text)
        self._token_ids += token_ids
        self._logprobs += logprobs
        return StreamUpdate(
            prompt_index=self.prompt_index,
            index=self.index,
            text=delta.text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
            error=event.error,
        )

    def output(self) -> CompletionOutput:
        """The finished sequence."""
        assert self._finish is not None, f"sequence {self.prompt_index}.{self.index} is not finished"
        assert self._sampling.seed is not None
        return CompletionOutput(
            index=self.index,
            text="".join(self._pieces),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
            seed=self._sampling.seed,
        )
