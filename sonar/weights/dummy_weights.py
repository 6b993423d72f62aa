"""Random weights of the shapes a model asks for, to measure speed without a checkpoint.

Called through `sonar.weights.open_weights`.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from sonar.config import ModelConfig
from sonar.ops.table import Matrix, PlainMatrix

_BIAS_SCALE = 0.02


class DummyWeights:
    """Weights drawn from each tensor's name alone: the same on every rank and at every start, in any order of asking.

    Matrices are normal with variance 1 / K and norms multiply by about one, so that activations stay near unit size
    through any number of layers. Made on the device, in the compute dtype.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._norm_center = 0.0 if config.architecture == "gemma3_text" else 1.0  # gemma multiplies by 1 + weight

    def has(self, name: str) -> bool:
        """Whether a checkpoint of this configuration would have the tensor."""
        config = self._config
        part, _, kind = name.rpartition(".")
        if name == "lm_head.weight":
            return not config.tie_word_embeddings
        if name.startswith("rope_"):  # tensors of GGUF files alone
            return False
        if kind != "bias" or config.architecture == "gpt2":
            return True
        layer = part.rpartition(".")[2]
        if layer in ("q_proj", "k_proj", "v_proj") or (config.architecture == "gpt_oss" and layer == "o_proj"):
            return config.qkv_bias
        return bool(config.extra.get("o_proj_bias" if layer == "o_proj" else "mlp_bias", 0.0))

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See `WeightSource.tensor`; never raises."""
        center = 0.0 if name.endswith(("bias", ".sinks")) else self._norm_center
        return self._normal(name, shape).mul_(_BIAS_SCALE).add_(center).to(dtype or self._dtype)

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """See `WeightSource.matrix`; never raises."""
        return PlainMatrix(self._normal(name, shape).mul_(shape[1] ** -0.5))

    def unread(self) -> list[str]:
        """Nothing."""
        return []

    def sizes(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
