"""Fixtures: tokenizers are built once."""

from __future__ import annotations

import pytest

from sonar.tokenizer import Tokenizer
from tests.tokenizer.cases import sentencepiece_tokenizer, smollm2_tokenizer


@pytest.fixture(scope="package")
def demo() -> Tokenizer:
    return smollm2_tokenizer()


@pytest.fixture(scope="package")
def pieces() -> Tokenizer:
    return sentencepiece_tokenizer()


@pytest.fixture(scope="package", params=["byte-level", "sentencepiece", "sentencepiece without prefix"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One of each kind."""
    if request.param == "byte-level":
        return smollm2_tokenizer()
    return sentencepiece_tokenizer(add_space_prefix=request.param == "sentencepiece")
