"""Text <-> token ids, chat templates and streaming detokenization; for the API and for offline use. Torch-free.

`load_tokenizer` reads a model's own tokenizer, in whatever form its folder or file holds it. `OutputText` turns the
tokens of one request into text as they come.
"""

from __future__ import annotations

from sonar.tokenizer.bad_words import find_bad_words
from sonar.tokenizer.detokenizer import IncrementalDetokenizer
from sonar.tokenizer.load import load_tokenizer
from sonar.tokenizer.output_text import OutputText, TextDelta
from sonar.tokenizer.stop_strings import StopStrings
from sonar.tokenizer.tokenizer import Tokenizer

__all__ = [
    "IncrementalDetokenizer",
    "OutputText",
    "StopStrings",
    "TextDelta",
    "Tokenizer",
    "find_bad_words",
    "load_tokenizer",
]
