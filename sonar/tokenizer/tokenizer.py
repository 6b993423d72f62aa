"""A model's tokenizer: text -> ids, ids -> text and bytes, messages -> prompt.

A thin layer over the `tokenizers` package. Decoding is done here, from each token's bytes, so that one text comes out
whether tokens are decoded at once or one by one. It equals that package's decoding but for bytes that are no UTF-8
(one U+FFFD for each maximal broken sequence, as Unicode recommends, where SentencePiece's decoder gives one for each
byte of the whole run). Called by the API and `sonar.llm`, both through `load_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

from sonar.errors import UserError
from sonar.tokenizer.chat_template import ChatTemplates
from sonar.tokenizer.length_bound import LengthBound
from sonar.tokenizer.token_bytes import read_decoder


@dataclass(frozen=True)
class SpecialTokens:
    """What the model's files say of special tokens.

    Attributes:
        names: role ("bos_token", "eos_token", ...) -> the token's text; chat templates read them by these names.
        prefix_ids, suffix_ids: put around an encoded text, beyond what the tokenizer's own post-processor adds.
    """

    names: Mapping[str, str]
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()


class Tokenizer:
    """A loaded tokenizer; holds no state of a request and may be shared by threads.

    Args:
        core: the tokenizer itself; its truncation and padding are switched off.
        name: the model, for errors.

    Attributes:
        vocab_size: tokens it can produce; a model's vocabulary may be padded beyond that.
        special_ids: what `skip_special_tokens` skips.
        strip_left: spaces at the beginning of a decoded text that belong to no text.

    Raises:
        ModelError: the tokenizer's decoder is of an unknown kind.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, special: SpecialTokens, chat_templates: ChatTemplates, name: str
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.name = name
        self.chat_templates = chat_templates
        self.vocab_size = core.get_vocab_size(with_added_tokens=True)
        self._special = special
        self._decoder = read_decoder(core, name)
        added = core.get_added_tokens_decoder()
        flagged = {index for index, token in added.items() if token.special}
        self.special_ids = frozenset(flagged | ({self.bos_token_id, self.eos_token_id} - {None}))
        self.strip_left = self._decoder.strip_left
        self._bytes = {index: token.content.encode() for index, token in added.items()}

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence, if the model has one (whether it is put there is another matter)."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that the tokenizer's files call the end; the engine ends at `ModelConfig.eos_token_ids`."""
        return self._named_id("eos_token")

    @cached_property
    def length_bound(self) -> LengthBound:
        """How many tokens a text has at least. The first use reads the whole vocabulary: up to a second."""
        return LengthBound(self.core, self._decoder.convert)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens spelled out in it become their ids.

        Args:
            add_special_tokens: put what the model's files ask for around it (bos, as a rule); not wanted after
                `apply_chat_template`, which writes them itself.

        Raises:
            UserError: the text holds lone surrogates, which no encoding has.
        """
        _refuse_surrogates(text)
        # The batch call, even for one text: unlike `encode` it lets other threads run meanwhile.
        ids = self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens:
            return [*self._special.prefix_ids, *ids, *self._special.suffix_ids]
        return list(ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, after_text: bool = False) -> str:
        """Text of token ids; ids that are no token give nothing.

        Args:
            after_text: the ids continue a text, so that the space before their first word is part of it;
                SentencePiece puts one before a text's beginning too, where it is dropped.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_to_bytes(index) for index in ids if index not in skipped])
        text = data.decode("utf-8", "replace")
        return text if after_text else strip_spaces(text, self.strip_left)[0]

    def token_to_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, maybe a part of a character; empty for an id that is no token."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.core.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            data = self._bytes[token_id] = b"" if token is None else self._decoder.convert(token)
        return data

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the vocabulary; None if there is no such token."""
        index: int | None = self.core.token_to_id(token)
        return index

    def encode_word_inside(self, word: str) -> list[int]:
        """Ids of a text as it stands within a longer one, without the space SentencePiece puts before a beginning."""
        if self.strip_left == 0:
            return self.encode(word, add_special_tokens=False)
        _refuse_surrogates(word)
        return [token.id for token in self.core.model.tokenize(word.replace(" ", self._decoder.space))]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The prompt of a conversation; encode it with add_special_tokens=False.

        Args:
            messages, tools: as in OpenAI's API, of plain JSON values.
            add_generation_prompt: end with what makes the model answer.
            template_kwargs: further variables for the template.
            chat_template: used instead of the model's own.

        Raises:
            UserError: the model has no template, or the template refuses the messages.
        """
        return self.chat_templates.render(
            messages, tools, add_generation_prompt, {**self._special.names, **(template_kwargs or {})}, chat_template
        )

    def _named_id(self, role: str) -> int | None:
        name = self._special.names.get(role)
        return None if name is None else self.token_to_id(name)


def _refuse_surrogates(text: str) -> None:
    """JSON can carry halves of characters, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"text has a lone surrogate at character {error.start}; send valid Unicode"
        raise UserError(problem, code="invalid_text") from error


def strip_spaces(text: str, count: int) -> tuple[str, int]:
    """Remove up to `count` spaces from the beginning; returns the rest, and the count left for text that follows."""
    while count and text:
        if text[0] != " ":
            return text, 0
        text, count = text[1:], count - 1
    return text, count
