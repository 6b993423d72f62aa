"""Prompts to measure with: random token ids, random words, token ids behind shared prefixes, or the lines of a file.

Seeded, so that two servers see the same prompts. Random ids need no tokenizer; they are drawn from [LOWEST_ID,
vocab_size), past the special tokens that most vocabularies keep at their start. Knows nothing of HTTP or engines.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from sonar.errors import ConfigError

LOWEST_ID = 100
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)
WORDS = tuple(_TEXT.split())


class DatasetKind(Enum):
    """Where prompts come from."""

    RANDOM = "random"
    WORDS = "words"
    SHARED_PREFIX = "shared-prefix"
    FILE = "file"


class Prompt(msgspec.Struct, frozen=True):
    """One request's input: token ids or text, and how many tokens to generate at most."""

    content: list[int] | str
    output_len: int


@dataclass(frozen=True)
class DatasetConfig:
    """What to draw.

    Attributes:
        input_len, output_len: tokens (words for WORDS). A file's prompts keep their own length.
        length_spread: lengths are uniform in [len * (1 - spread), len].
        prefix_len, num_prefixes: SHARED_PREFIX only: each prompt is one of the prefixes and then input_len own tokens.
        path: FILE only: a prompt a line; a line that is a JSON object has "prompt" and maybe "output_len".
    """

    kind: DatasetKind = DatasetKind.RANDOM
    input_len: int = 128
    output_len: int = 64
    length_spread: float = 0.0
    prefix_len: int = 512
    num_prefixes: int = 1
    vocab_size: int = 10000
    path: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; must be at least 1", param=name)
        if self.vocab_size <= LOWEST_ID:
            raise ConfigError(f"vocab_size={self.vocab_size}; must exceed {LOWEST_ID}", param="vocab_size")
        if not 0.0 <= self.length_spread < 1.0:
            raise ConfigError(f"length_spread={self.length_spread}; choose 0 to below 1", param="length_spread")
        if (self.kind is DatasetKind.FILE) != bool(self.path):
            raise ConfigError("--dataset file and --dataset-path FILE need each other", param="path")


def make_prompts(config: DatasetConfig, count: int) -> list[Prompt]:
    """`count` prompts, the same for the same configuration; a shorter file is repeated.

    Raises:
        ConfigError: the file cannot be read or holds no prompt.
    """
    generator = random.Random(config.seed)
    if config.kind is DatasetKind.FILE:
        lines = _read_file(config)
        return [lines[i % len(lines)] for i in range(count)]
    prefixes = [_ids(generator, config.prefix_len, config.vocab_size) for _ in range(config.num_prefixes)]
    prompts = []
    for i in range(count):
        input_len = _length(generator, config.input_len, config.length_spread)
        output_len = _length(generator, config.output_len, config.length_spread)
        content: list[int] | str
        if config.kind is DatasetKind.WORDS:
            content = " ".join(generator.choices(WORDS, k=input_len))
        else:
            content = _ids(generator, input_len, config.vocab_size)
            if config.kind is DatasetKind.SHARED_PREFIX:
                content = prefixes[i % len(prefixes)] + content
        prompts.append(Prompt(content, output_len))
    return prompts


def _ids(generator: random.Random, count: int, vocab_size: int) -> list[int]:
    return generator.choices(range(LOWEST_ID, vocab_size), k=count)


def _length(generator: random.Random, length: int, spread: float) -> int:
    return generator.randint(max(1, round(length * (1.0 - spread))), length)


def _read_file(config: DatasetConfig) -> list[Prompt]:
    try:
        lines = [line for line in Path(config.path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {config.path}: {error}", param="path") from error
    if not lines:
        raise ConfigError(f"--dataset-path {config.path} holds no prompt", param="path")
    return [_parse_line(line, config.output_len) for line in lines]


class _Line(msgspec.Struct):
    prompt: str
    output_len: int | None = None


def _parse_line(line: str, output_len: int) -> Prompt:
    """A JSON object with "prompt", or the line itself."""
    try:
        parsed = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError:
        return Prompt(line, output_len)
    return Prompt(parsed.prompt, parsed.output_len or output_len)
