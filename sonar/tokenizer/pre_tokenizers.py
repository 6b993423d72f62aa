"""How byte-level tokenizers cut a text into words before merging: by the names GGUF files give these rules.

The patterns are those in the models' own tokenizer.json. A name that is not known is refused: another rule gives other
tokens, and a model that answers a little worse than it could is a fault that nobody finds.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers import pre_tokenizers as pre

from sonar.errors import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDINGS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LETTERS_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _ENDINGS
_OTHERS_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _ENDINGS
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"

_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _OTHERS
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _OTHERS
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _ENDINGS
_TEKKEN = f"{_LETTERS_UPPER}*{_LETTERS_LOWER}+|{_LETTERS_UPPER}+{_LETTERS_LOWER}*" + r"|\p{N}" + _OTHERS_SLASH
_GPT4O = (
    f"{_LETTERS_UPPER}*{_LETTERS_LOWER}+{_CONTRACTIONS}?|{_LETTERS_UPPER}+{_LETTERS_LOWER}*{_CONTRACTIONS}?"
    + r"|\p{N}{1,3}"
    + _OTHERS_SLASH
)


@dataclass(frozen=True)
class PreTokenizer:
    """One rule.

    Attributes:
        pattern: its matches are the words; empty = GPT-2's own pattern.
        splits_digits: cut every digit off first.
        normalizes_nfc: compose characters before anything else.
        ignore_merges: a word that is a token is that token, whatever the merges say.
        adds_bos: what holds when a file does not say whether bos comes first.
    """

    pattern: str = ""
    splits_digits: bool = False
    normalizes_nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre.PreTokenizer:
        """The rule as the `tokenizers` package takes it."""
        steps: list[pre.PreTokenizer] = [pre.Digits(individual_digits=True)] if self.splits_digits else []
        if self.pattern:
            steps.append(pre.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=not self.pattern))
        return pre.Sequence(steps)


_GPT2_RULE = PreTokenizer()
_SMOLLM_RULE = PreTokenizer(splits_digits=True)
_LLAMA3_RULE = PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True)
_LLAMA3_PLAIN_RULE = PreTokenizer(_LLAMA3)
_QWEN2_RULE = PreTokenizer(_QWEN2, normalizes_nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "mpt": _GPT2_RULE,
    "smollm": _SMOLLM_RULE,
    "starcoder": _SMOLLM_RULE,
    "refact": _SMOLLM_RULE,
    "command-r": _SMOLLM_RULE,
    "codeshell": _SMOLLM_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "pixtral": _LLAMA3_RULE,
    "falcon3": PreTokenizer(_LLAMA3, ignore_merges=True),
    "dbrx": _LLAMA3_PLAIN_RULE,
    "smaug-bpe": _LLAMA3_PLAIN_RULE,
    "chatglm-bpe": _LLAMA3_PLAIN_RULE,
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "megrez": _QWEN2_RULE,
    "qwen35": PreTokenizer(_QWEN35, normalizes_nfc=True),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(_GPT4O),
}


def find_pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """The rule of a name. where: the file, for the error. Raises ModelError if it is not known; lists what is."""
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{where}: pre-tokenizer {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}; the model's "
            "Hugging Face folder can be served instead",
            param="model",
        )
    return PRE_TOKENIZERS[name]
