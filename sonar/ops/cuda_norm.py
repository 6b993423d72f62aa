"""RMSNorm, with the residual's addition before it, as one Triton kernel of one program a row.

Sums in float32; differs from the reference by the rounding of one result. Built into its table by `sonar.ops.cuda`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonar.ops.cuda_launch import power_of_two, wait_for_inputs


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    eps,
    NUM_COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < NUM_COLUMNS
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + row * residual_stride + columns, x, mask=mask)
    x = x.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(x * x, axis=0) / NUM_COLUMNS + eps)
    tl.store(out_ptr + row * NUM_COLUMNS + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


class RmsNorms:
    """`RmsNormFn` and `AddRmsNormFn`. has_pdl: launch dependently (`sonar.ops.cuda_launch`)."""

    def __init__(self, *, has_pdl: bool) -> None:
        self._has_pdl = has_pdl

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `sonar.ops.table.RmsNormFn`; x may have any leading dimensions."""
        out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        if x_TD.numel():
            self._launch(_as_rows(x_TD), None, weight_D, out_TD, eps)
        return out_TD

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `sonar.ops.table.AddRmsNormFn`."""
        out_TD = torch.empty(residual_TD.shape, dtype=residual_TD.dtype, device=residual_TD.device)
        if x_TD.numel():
            self._launch(_as_rows(x_TD), residual_TD, weight_D, out_TD, eps)
        return out_TD

    def _launch(self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, out_TD: Tensor, eps: float) -> None:
        num_rows, num_columns = x_TD.shape
        block = power_of_two(num_columns, 32)
        residual = x_TD if residual_TD is None else residual_TD
        assert residual.dim() == 2 and residual.stride(1) == 1, f"residual of strides {residual.stride()}"
        _rms_norm_kernel[(num_rows,)](
            x_TD,
            residual,
            weight_D,
            out_TD,
            x_TD.stride(0),
            residual.stride(0),
            eps,
            NUM_COLUMNS=num_columns,
            HAS_RESIDUAL=residual_TD is not None,
            BLOCK=block,
            PDL=self._has_pdl,
            num_warps=8 if block >= 4096 else 4,
            **({"launch_pdl": True} if self._has_pdl else {}),
        )


def _as_rows(x_TD: Tensor) -> Tensor:
    """(rows, columns) with contiguous rows; a copy only where strides forbid a view."""
    x_TD = x_TD if x_TD.dim() == 2 else x_TD.reshape(-1, x_TD.shape[-1])
    return x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
