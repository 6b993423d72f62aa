"""From the tokens of one request to the text its client sees: detokenization and stop strings together.

Called by the API for streams and by `sonar.llm`. Knows nothing of messages or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sonar.sampling_params import SamplingParams
from sonar.tokenizer.detokenizer import IncrementalDetokenizer
from sonar.tokenizer.stop_strings import StopStrings
from sonar.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """What some tokens added.

    Attributes:
        text: to send on; may be empty.
        num_tokens: tokens consumed; fewer than were given when a stop string ended the output within them: the rest
            is not part of it.
        stop: the stop string that ended the output, or None.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class OutputText:
    """The text of one request: owner of what is held back of it.

    Stop strings are looked for in the text of the tokens after the first `sampling.min_tokens`.

    Args:
        sampling: its stop, min_tokens and include_stop_in_output are read.
        skip_special_tokens: leave special tokens out of the text.
        after_text: see `Tokenizer.decode`: true for a completion of a prompt, false for a chat's answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        skip_special_tokens: bool = True,
        after_text: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, after_text)
        self._stops = StopStrings(sampling.stop, sampling.include_stop_in_output)
        self._include_stop = sampling.include_stop_in_output
        self._num_unchecked = sampling.min_tokens

    @property
    def stop(self) -> str | None:
        """The stop string that ended the output, or None."""
        return None if self._stops.match is None else self._stops.match.stop

    def push(self, token_ids: Sequence[int], *, is_last: bool = False, stop_token_id: int | None = None) -> TextDelta:
        """Take new tokens.

        Args:
            is_last: no more will come: give what was held back too.
            stop_token_id: the id that ended the output, if one did; its own text is left out, unless
                `include_stop_in_output` asks for it.
        """
        pieces: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            is_stop = count == len(token_ids) and token_id == stop_token_id
            if is_stop and not self._include_stop:
                continue
            pieces.append(self._check(self._detokenizer.push(token_id)))
            if self._stops.match is not None:
                return TextDelta("".join(pieces), count, self._stops.match.stop)
        if is_last:
            pieces.append(self._stops.push(self._detokenizer.flush()))
            pieces.append(self._stops.flush())
        return TextDelta("".join(pieces), len(token_ids), self.stop)

    def _check(self, text: str) -> str:
        """Look for stop strings, once the first tokens are past."""
        if self._num_unchecked > 0:
            self._num_unchecked -= 1
            return self._stops.skip(text)
        return self._stops.push(text)
