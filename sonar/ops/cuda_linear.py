"""Linear layers on a GPU: few rows by kernels bound by memory, many by cuBLAS; and the fused products of small steps.

Which kernel serves which number of rows, and with which tiles, was measured (`sonar.ops.cuda_tiles`). Built into its
table by `sonar.ops.cuda`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sonar.ops.cuda_activation import GatedActivations, activation_kind
from sonar.ops.cuda_launch import ceil_div, power_of_two
from sonar.ops.cuda_matmul import few_rows_kernel, one_row_kernel
from sonar.ops.cuda_norm import RmsNorms
from sonar.ops.cuda_tiles import FewRowsTiles, OneRowTiles, TileTable
from sonar.ops.reference_matrix import MatrixOps
from sonar.ops.table import Activation, EmbeddingFn, FusedOps, LinearFn, Matrix, RopeAttentionFn

MAX_FEW_ROWS = 16


@dataclass(frozen=True)
class Fusion:
    """What goes with a product besides bias.

    Attributes:
        norm_K, norm_eps: RMSNorm of the input, or None.
        residual_MN: added to, in place, and returned; or None.
        gate: activation of the first half of the outputs, times the second half; or None.
    """

    norm_K: Tensor | None = None
    norm_eps: float = 0.0
    residual_MN: Tensor | None = None
    gate: Activation | None = None

    @property
    def kind(self) -> str:
        """Its name in the table of tiles."""
        if self.gate is not None:
            return "gate"
        return (
            "plain"
            if self.norm_K is None and self.residual_MN is None
            else "norm"
            if self.norm_K is not None
            else "add"
        )


_NO_FUSION = Fusion()


class LinearParts:
    """What the linear layers of a table share.

    Attributes:
        counters: int32, zero between launches: programs that share an output meet there. For one stream at a time.
        tiles: measured choices. norms, activations: what cuBLAS is surrounded with where it is faster than a fusion.
        launch: keywords of every launch.
    """

    def __init__(self, device: torch.device, *, has_pdl: bool) -> None:
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)
        self.tiles = TileTable(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
        self.norms = RmsNorms(has_pdl=has_pdl)
        self.activations = GatedActivations(has_pdl=has_pdl)
        self.launch = {"PDL": has_pdl, **({"launch_pdl": True} if has_pdl else {})}


class CudaLinear:
    """A prepared linear layer (`LinearFn`), which can also be applied fused to steps of few rows.

    Args:
        weight_NK: contiguous, on the device. bias_N: of the same dtype, or None.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, parts: LinearParts) -> None:
        assert weight_NK.is_contiguous()
        self.weight_NK = weight_NK
        self.bias_N = bias_N
        self._parts = parts
        self._is_half = weight_NK.dtype in (torch.bfloat16, torch.float16)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """x_TK -> y_TN."""
        if self._is_half and x_TK.shape[0] == 1 and x_TK.dim() == 2:
            return self.apply_fused(x_TK, _NO_FUSION)
        return F.linear(x_TK, self.weight_NK, self.bias_N)

    def apply_fused(self, x_MK: Tensor, fusion: Fusion) -> Tensor:
        """The product with what `fusion` names, for 1 to `MAX_FEW_ROWS` rows of a 16-bit dtype.

        Returns:
            (M, N), or (M, N / 2) when gated; the residual itself when there is one.
        """
        num_rows, tiles = x_MK.shape[0], self._parts.tiles
        num_out, num_in = self._shape(fusion)
        if num_rows > 1:
            few = tiles.few_rows(num_rows, num_out, num_in, fusion.kind)
            if few is None:
                return self.apply_apart(x_MK, fusion)
        out_MN = fusion.residual_MN
        if out_MN is None:
            out_MN = torch.empty((num_rows, num_out), dtype=x_MK.dtype, device=x_MK.device)
        assert x_MK.stride(1) == 1 and out_MN.stride(1) == 1, f"strides {x_MK.stride()}, {out_MN.stride()}"
        if num_rows == 1:
            self.launch_one_row(x_MK, out_MN, fusion, tiles.one_row(num_out, num_in, fusion.kind))
        else:
            assert few is not None
            self.launch_few_rows(x_MK, out_MN, fusion, few)
        return out_MN

    def apply_apart(self, x_MK: Tensor, fusion: Fusion) -> Tensor:
        """The same by cuBLAS, the rest as separate kernels; an addition is cuBLAS's own."""
        if fusion.norm_K is not None:
            x_MK = self._parts.norms.rms_norm(x_MK, fusion.norm_K, fusion.norm_eps)
        residual_MN = fusion.residual_MN
        if residual_MN is not None:
            if self.bias_N is None:
                return torch.addmm(residual_MN, x_MK, self.weight_NK.t(), out=residual_MN)
            return residual_MN.add_(F.linear(x_MK, self.weight_NK, self.bias_N))
        out_MN = F.linear(x_MK, self.weight_NK, self.bias_N)
        return out_MN if fusion.gate is None else self._parts.activations.gated_activation(out_MN, fusion.gate)

    def launch_one_row(self, x_MK: Tensor, out_MN: Tensor, fusion: Fusion, tiles: OneRowTiles) -> None:
        """Launches `one_row_kernel` with given tiles (benchmarks call this to choose them)."""
        num_out, num_in = self._shape(fusion)
        one_row_kernel[(ceil_div(num_out, tiles.block_n),)](
            *self._pointers(x_MK, out_MN, fusion),
            fusion.norm_eps,
            N=num_out,
            K=num_in,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            num_warps=tiles.num_warps,
            **self._switches(fusion),
            **self._parts.launch,
        )

    def launch_few_rows(self, x_MK: Tensor, out_MN: Tensor, fusion: Fusion, tiles: FewRowsTiles) -> None:
        """Launches `few_rows_kernel` with given tiles."""
        num_out, num_in = self._shape(fusion)
        programs, split = ceil_div(num_out, tiles.block_n), tiles.split_k
        block_m = power_of_two(x_MK.shape[0], 16)
        parts = (programs * split, 2 if _is_gated(fusion) else 1, tiles.block_n, block_m) if split > 1 else (1,)
        partial = torch.empty(parts, dtype=torch.float32, device=x_MK.device)
        squares = torch.empty((programs * split, block_m) if split > 1 else (1,), device=x_MK.device)
        few_rows_kernel[(programs, split)](
            *self._pointers(x_MK, out_MN, fusion),
            partial,
            squares,
            self._parts.counters,
            fusion.norm_eps,
            x_MK.shape[0],
            x_MK.stride(0),
            out_MN.stride(0),
            N=num_out,
            K=num_in,
            BLOCK_N=tiles.block_n,
            BLOCK_M=block_m,
            BLOCK_K=tiles.block_k,
            SPLIT_K=split,
            NUM_STAGES=tiles.num_stages,
            num_warps=tiles.num_warps,
            **self._switches(fusion),
            **self._parts.launch,
        )

    def _shape(self, fusion: Fusion) -> tuple[int, int]:
        num_out, num_in = self.weight_NK.shape
        return num_out // (2 if _is_gated(fusion) else 1), num_in

    def _pointers(self, x_MK: Tensor, out_MN: Tensor, fusion: Fusion) -> tuple[Tensor, ...]:
        """x, weight, bias, norm, residual, out; x stands for what is not there."""
        bias = x_MK if self.bias_N is None else self.bias_N
        norm = x_MK if fusion.norm_K is None else fusion.norm_K
        return x_MK, self.weight_NK, bias, norm, out_MN, out_MN

    def _switches(self, fusion: Fusion) -> dict[str, bool | int]:
        return {
            "HAS_BIAS": self.bias_N is not None,
            "HAS_NORM": fusion.norm_K is not None,
            "HAS_RESIDUAL": fusion.residual_MN is not None,
            "GATED": 0 if fusion.gate is None else 1 + activation_kind(fusion.gate),
        }


def _is_gated(fusion: Fusion) -> bool:
    return fusion.gate is not None


class CudaMatrices:
    """`LinearFactory`, `EmbeddingFactory`: dense weights in the compute dtype, quantized ones dequantized at load."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, has_pdl: bool) -> None:
        self._dense = MatrixOps(device, dtype)
        self._device, self._dtype = device, dtype
        self._parts = LinearParts(device, has_pdl=has_pdl)

    def linear(self, parts: Sequence[Matrix], bias_N: Tensor | None) -> LinearFn:
        """See `sonar.ops.table.LinearFactory`. Raises `ModelError` for a quantization that cannot be read."""
        if bias_N is not None:
            bias_N = bias_N.to(self._device, self._dtype)
        return CudaLinear(self._dense.dense(parts).contiguous(), bias_N, self._parts)

    def embedding(self, table: Matrix) -> EmbeddingFn:
        """See `sonar.ops.table.EmbeddingFactory`. Raises as `linear`."""
        return self._dense.embedding(table)

    def fused_ops(self, rope_attention: RopeAttentionFn) -> FusedOps:
        """The products of this factory's layers, fused with their surroundings."""
        return FusedOps(MAX_FEW_ROWS, _norm_linear, _norm_gated_linear, _linear_add, rope_attention)


def _norm_linear(linear: LinearFn, x_TD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    return _own(linear).apply_fused(x_TD, Fusion(norm_K=norm_D, norm_eps=eps))


def _norm_gated_linear(linear: LinearFn, x_TD: Tensor, norm_D: Tensor, eps: float, activation: Activation) -> Tensor:
    return _own(linear).apply_fused(x_TD, Fusion(norm_K=norm_D, norm_eps=eps, gate=activation))


def _linear_add(linear: LinearFn, x_TK: Tensor, residual_TD: Tensor) -> None:
    _own(linear).apply_fused(x_TK, Fusion(residual_MN=residual_TD))


def _own(linear: LinearFn) -> CudaLinear:
    assert isinstance(linear, CudaLinear), f"{type(linear).__name__} was not made by this backend"
    return linear
