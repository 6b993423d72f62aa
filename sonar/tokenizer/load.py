"""Finding and building a model's tokenizer, in whatever form its folder or file holds it.

Called by the API and `sonar.llm`; nothing of it runs per request.
"""

from __future__ import annotations

from sonar.gguf_file import GGUFFile
from sonar.model_source import ModelKind, ModelSource
from sonar.tokenizer.folder_tokenizer import load_folder_tokenizer
from sonar.tokenizer.gguf_tokenizer import load_gguf_tokenizer
from sonar.tokenizer.tokenizer import Tokenizer


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of the model at `source`, with its chat templates.

    Raises:
        ModelError: there is none, it is damaged, or of a kind that is not supported; says which are.
    """
    if source.kind is ModelKind.GGUF:
        return load_gguf_tokenizer(GGUFFile(source.path), source.name)
    return load_folder_tokenizer(source.path, source.name)
