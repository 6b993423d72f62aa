"""The reference backend: every op of `sonar.ops.table` in plain torch, for any device and float dtype.

Says what each op means; other backends are tested against it and take from it what they lack. Not batch-invariant:
torch chooses its matmul kernels by shape. Called by `sonar.ops.registry`.
"""

from __future__ import annotations

from functools import partial

import torch

from sonar.config import ActivationMode
from sonar.errors import ConfigError
from sonar.ops.reference_activation import activation, gated_activation
from sonar.ops.reference_attention import paged_attention, rope_kv_write
from sonar.ops.reference_experts import PerExpert, head_linear, route, sort_by_expert, weighted_sum
from sonar.ops.reference_latent import LatentOps
from sonar.ops.reference_matrix import MatrixOps
from sonar.ops.reference_norm import add_rms_norm, layer_norm, rms_norm
from sonar.ops.reference_sample import sample
from sonar.ops.table import OpTable


def build(device: torch.device, dtype: torch.dtype, activations: ActivationMode = "auto") -> OpTable:
    """The ops that compute in `dtype` on `device`.

    Raises:
        ConfigError: 8-bit activations, which need kernels of their own.
    """
    if activations == "int8":
        raise ConfigError(
            f"activations='int8' has no kernels on {device} here; use 'float32', or build the CPU kernels",
            param="activations",
        )
    matrices = MatrixOps(device, dtype)
    latent = LatentOps(rms_norm, paged_attention)
    return OpTable(
        name="reference",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        layer_norm=layer_norm,
        rope_kv_write=rope_kv_write,
        paged_attention=paged_attention,
        gated_activation=gated_activation,
        activation=activation,
        linear=matrices.linear,
        embedding=matrices.embedding,
        sample=sample,
        route=route,
        sort_by_expert=sort_by_expert,
        weighted_sum=weighted_sum,
        experts=PerExpert(matrices.linear, gated_activation).experts,
        head_linear=partial(head_linear, matrices.dense),
        latent_write=latent.write,
        latent_attention=latent.attention,
    )
