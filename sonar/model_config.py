"""A model's shape, read from wherever it is written: `config.json` of a folder, or GGUF metadata.

Called by the head (context length, end ids), the workers and the tools. Reads no weights. Torch-free.
"""

from __future__ import annotations

from sonar.config import ModelConfig
from sonar.gguf_file import GGUFFile
from sonar.model_config_gguf import read_gguf_config
from sonar.model_config_hf import read_hf_config
from sonar.model_source import ModelKind, ModelSource


def load_model_config(source: ModelSource) -> ModelConfig:
    """The configuration of the model at `source`.

    Raises:
        ModelError: a field is missing or wrong (named), or the architecture, quantization, rope scaling or another
            trait is not supported (the text lists what is).
    """
    if source.kind is ModelKind.GGUF:
        return read_gguf_config(GGUFFile(source.path))
    return read_hf_config(source.path)
