"""Linear layers on a GPU: few rows by kernels bound by memory, many by cuBLAS; and the fused products of small steps.

Which kernel serves which number of rows, and with which tiles, was measured (benchmarks/gpu/NOTES.md). Built into its
table by `sonar.ops.cuda`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sonar.ops.cuda_activation import activation_kind
from sonar.ops.cuda_launch import ceil_div, power_of_two
from sonar.ops.cuda_matmul import few_rows_kernel, one_row_kernel
from sonar.ops.reference_matrix import MatrixOps
from sonar.ops.table import Activation, EmbeddingFn, FusedOps, LinearFn, Matrix

MAX_FEW_ROWS = 16
# Numbers of a weight's tile that a program of `one_row_kernel` holds in registers: 64 a thread of 8 warps.
_MAX_TILE = 16384
_PROGRAMS = 132


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


@dataclass(frozen=True)
class OneRowTiles:
    """Tiles of `one_row_kernel`."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class FewRowsTiles:
    """Tiles of `few_rows_kernel`."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


_NO_FUSION = Fusion()


def one_row_tiles(num_out: int, num_in: int, *, is_gated: bool) -> OneRowTiles:
    """Rows a program takes and how much of them at a time: a tile of up to 16,384 numbers, programs for every
    multiprocessor."""
    block_k = min(power_of_two(num_in, 128), 2048 if is_gated else 4096)
    most = max(1, _MAX_TILE // (2 if is_gated else 1) // block_k)
    fair = power_of_two(max(1, num_out // _PROGRAMS))
    block_n = min(most, fair, 16)
    return OneRowTiles(block_n, block_k, 8 if block_n * block_k >= 8192 else 4)


def few_rows_tiles(num_out: int, num_in: int, *, is_gated: bool) -> FewRowsTiles:
    """Tiles by which a product of few rows reads its weight at full bandwidth."""
    block_n = 64 if num_out >= 64 * _PROGRAMS else 32 if num_out >= 32 * _PROGRAMS else 16
    block_k = 128 if is_gated and block_n == 64 else 256
    block_k = min(block_k, power_of_two(num_in, 16))
    programs = ceil_div(num_out, block_n)
    split_k = 1
    while programs * split_k < 2 * _PROGRAMS and split_k < 8 and num_in // (split_k * block_k) >= 4:
        split_k *= 2
    return FewRowsTiles(block_n, block_k, split_k, 4, 4)


class Scratch:
    """Device memory by which programs that share an output meet; owned by the table, used by one stream.

    Attributes:
        counters: int32, zero between launches.
    """

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)


class CudaLinear:
    """A prepared linear layer (`LinearFn`), which can also be applied fused to steps of few rows.

    Args:
        weight_NK: contiguous, on the device. bias_N: of the same dtype, or None.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, scratch: Scratch, *, has_pdl: bool) -> None:
        assert weight_NK.is_contiguous()
        self.weight_NK = weight_NK
        self.bias_N = bias_N
        self._scratch = scratch
        self._launch = {"PDL": has_pdl, **({"launch_pdl": True} if has_pdl else {})}
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
        num_rows = x_MK.shape[0]
        num_out = self.weight_NK.shape[0] // (1 if fusion.gate is None else 2)
        out_MN = fusion.residual_MN
        if out_MN is None:
            out_MN = torch.empty((num_rows, num_out), dtype=x_MK.dtype, device=x_MK.device)
        assert x_MK.stride(1) == 1 and out_MN.stride(1) == 1, f"strides {x_MK.stride()}, {out_MN.stride()}"
        if num_rows == 1:
            self.launch_one_row(x_MK, out_MN, fusion, one_row_tiles(*self._shape(fusion), is_gated=_is_gated(fusion)))
        else:
            self.launch_few_rows(x_MK, out_MN, fusion, few_rows_tiles(*self._shape(fusion), is_gated=_is_gated(fusion)))
        return out_MN

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
            **self._launch,
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
            self._scratch.counters,
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
            **self._launch,
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
    """`LinearFactory` and `EmbeddingFactory`: dense weights in the compute dtype, quantized ones dequantized at load."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, has_pdl: bool) -> None:
        self._dense = MatrixOps(device, dtype)
        self._device, self._dtype = device, dtype
        self._has_pdl = has_pdl
        self._scratch = Scratch(device)

    def linear(self, parts: Sequence[Matrix], bias_N: Tensor | None) -> LinearFn:
        """See `sonar.ops.table.LinearFactory`. Raises `ModelError` for a quantization that cannot be read."""
        if bias_N is not None:
            bias_N = bias_N.to(self._device, self._dtype)
        return CudaLinear(self._dense.dense(parts).contiguous(), bias_N, self._scratch, has_pdl=self._has_pdl)

    def embedding(self, table: Matrix) -> EmbeddingFn:
        """See `sonar.ops.table.EmbeddingFactory`. Raises as `linear`."""
        return self._dense.embedding(table)

    def fused_ops(self) -> FusedOps:
        """The products of this factory's layers, fused with their surroundings."""
        return FusedOps(MAX_FEW_ROWS, _norm_linear, _norm_gated_linear, _linear_add)


def _norm_linear(linear: LinearFn, x_TD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    return _own(linear).apply_fused(x_TD, Fusion(norm_K=norm_D, norm_eps=eps))


def _norm_gated_linear(linear: LinearFn, x_TD: Tensor, norm_D: Tensor, eps: float, activation: Activation) -> Tensor:
    return _own(linear).apply_fused(x_TD, Fusion(norm_K=norm_D, norm_eps=eps, gate=activation))


def _linear_add(linear: LinearFn, x_TK: Tensor, residual_TD: Tensor) -> None:
    _own(linear).apply_fused(x_TK, Fusion(residual_MN=residual_TD))


def _own(linear: LinearFn) -> CudaLinear:
    assert isinstance(linear, CudaLinear), f"{type(linear).__name__} was not made by this backend"
    return linear
