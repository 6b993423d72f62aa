"""Self-attention over the paged cache: project, rotate, write K and V, attend, project back. Called by the models."""

from __future__ import annotations

from torch import Tensor

from sonar.layers.mlp import GatedMlp
from sonar.layers.norms import RmsNorm
from sonar.ops.table import AttentionMetadata, AttentionSpec, FusedOps, LayerFn, LayerParts, LinearFn, OpTable


class Attention:
    """One layer's attention.

    Args:
        qkv: x_TD -> (T, (H + 2 G) * E): Q heads, K heads, V heads. output: (T, H * E) -> (T, D).
        cos_sin_PR: the layer kind's rotary table, or None for learned positions.
        q_norm_E, k_norm_E: RMSNorm weights per head, or None. norm_eps: theirs.
        sinks_H: one more logit a head in the softmax's denominator, or None.
    """

    def __init__(
        self,
        ops: OpTable,
        spec: AttentionSpec,
        *,
        qkv: LinearFn,
        output: LinearFn,
        cos_sin_PR: Tensor | None,
        q_norm_E: Tensor | None = None,
        k_norm_E: Tensor | None = None,
        norm_eps: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> None:
        self.spec = spec
        self._qkv = qkv
        self._output = output
        self._cos_sin_PR = cos_sin_PR
        self._q_norm_E = q_norm_E
        self._k_norm_E = k_norm_E
        self._norm_eps = norm_eps
        self._rope_kv_write = ops.rope_kv_write
        self._paged_attention = ops.paged_attention
        self._sinks_H = sinks_H
        self._rope_attention = ops.fused.rope_attention if ops.fused is not None and sinks_H is None else None

    def __call__(self, x_TD: Tensor, positions_T: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Writes this step's K and V to the cache and returns a new (T, D) tensor."""
        return self._output(self._attend(self._qkv(x_TD), positions_T, kv_cache, metadata))

    def add_fused(
        self,
        residual_TD: Tensor,
        norm: RmsNorm,
        positions_T: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        fused: FusedOps,
    ) -> None:
        """residual += attention(norm(residual)), in place."""
        qkv_TX = fused.norm_linear(self._qkv, residual_TD, norm.weight_D, norm.eps)
        fused.linear_add(self._output, self._attend(qkv_TX, positions_T, kv_cache, metadata), residual_TD)

    def whole_layer(self, fused: FusedOps, norm: RmsNorm, mlp: GatedMlp, mlp_norm: RmsNorm) -> LayerFn | None:
        """This attention and an MLP as one op; None where the backend has none."""
        if fused.layer is None or self._sinks_H is not None:
            return None
        assert norm.eps == mlp_norm.eps, f"norms of one layer differ: {norm.eps}, {mlp_norm.eps}"
        return fused.layer(
            LayerParts(
                attention_norm_D=norm.weight_D,
                mlp_norm_D=mlp_norm.weight_D,
                norm_eps=norm.eps,
                qkv=self._qkv,
                output=self._output,
                cos_sin_PR=self._cos_sin_PR,
                q_norm_E=self._q_norm_E,
                k_norm_E=self._k_norm_E,
                head_norm_eps=self._norm_eps,
                spec=self.spec,
                gate_up=mlp.gate_up,
                down=mlp.down,
                activation=mlp.activation,
            )
        )

    def _attend(self, qkv_TX: Tensor, positions_T: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        if self._rope_attention is not None and metadata.max_query_len == 1:
            return self._rope_attention(
                qkv_TX,
                positions_T,
                self._cos_sin_PR,
                self._q_norm_E,
                self._k_norm_E,
                self._norm_eps,
                kv_cache,
                metadata,
                self.spec,
            )
        q_THE = self._rope_kv_write(
            qkv_TX,
            positions_T,
            self._cos_sin_PR,
            self._q_norm_E,
            self._k_norm_E,
            self._norm_eps,
            kv_cache,
            metadata.slot_mapping_T,
            self.spec,
        )
        return self._paged_attention(q_THE, kv_cache, metadata, self.spec, self._sinks_H)
