"""The engine: token ids in, token ids out. `from sonar import LLM, SamplingParams` for offline use.

Importing this package imports no torch; `LLM` does, when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sonar.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sonar.llm import LLM as LLM

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from sonar.llm import LLM

        return LLM
    raise AttributeError(f"module 'sonar' has no attribute {name!r}")
