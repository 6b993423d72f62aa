"""A whole decoder layer in one call, for steps of few tokens. Built into its table by `sonar.ops.cpu`.

At one token the Python between a layer's ops costs a fifth of the time in which its weights are read. The bits are
those of the single ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.ops import _cpu
from sonar.ops.cpu_attention import Heads, request_arguments, score_arguments, token_arguments
from sonar.ops.cpu_matrix import CpuLinear
from sonar.ops.cpu_rows import ACTIVATION_KINDS, as_float32
from sonar.ops.table import AttentionMetadata, LayerParts

# Between the layer's parts lies scratch memory of some ten times the hidden size a token, which is kept: few tokens.
MAX_ROWS = 64


class CpuLayer:
    """A `LayerFn`. Owns the plan and what it points to."""

    def __init__(self, parts: LayerParts) -> None:
        self._head_dim = parts.spec.head_dim
        self._heads = Heads(parts.cos_sin_PR, parts.q_norm_E, parts.k_norm_E, parts.head_norm_eps, parts.spec)
        self._norms = as_float32(parts.attention_norm_D), as_float32(parts.mlp_norm_D)
        linears = (parts.qkv, parts.output, parts.gate_up, parts.down)
        qkv, output, gate_up, down = (linear for linear in linears if isinstance(linear, CpuLinear))
        self._linears = (qkv, output, gate_up, down)
        self._plan = _cpu.layer_plan(
            qkv.plan,
            output.plan,
            gate_up.plan,
            down.plan,
            self._norms[0].data_ptr(),
            self._norms[1].data_ptr(),
            parts.norm_eps,
            ACTIVATION_KINDS[parts.activation],
            *self._heads.arguments,
            *score_arguments(parts.spec),
        )

    def __call__(self, residual_TD: Tensor, positions_T: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        assert residual_TD.dtype is torch.float32 and residual_TD.is_contiguous()
        _cpu.layer(
            self._plan,
            residual_TD.data_ptr(),
            *token_arguments(positions_T, kv_cache, metadata.slot_mapping_T, self._head_dim),
            *request_arguments(metadata),
        )
