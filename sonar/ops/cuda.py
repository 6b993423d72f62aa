"""The CUDA backend: Triton kernels for what a decoder does every step, cuBLAS for products of many rows.

What it lacks (layer norm, activations without a gate) it takes from the reference, which runs on any device. Also meant
for ROCm, which Triton compiles for too: nothing here asks for a vendor, only for capabilities; not tried there. Not
batch-invariant: kernels are chosen by the number of rows. Called by `sonar.ops.registry`.
"""

from __future__ import annotations

import dataclasses

import torch

from sonar.ops import reference
from sonar.ops.registry import OpsUnavailable
from sonar.ops.table import OpTable

try:
    import triton  # noqa: F401
except ImportError as error:
    raise OpsUnavailable("triton is not installed") from error

from sonar.ops.cuda_activation import GatedActivations
from sonar.ops.cuda_attention import CudaAttention
from sonar.ops.cuda_launch import supports_dependent_launch
from sonar.ops.cuda_linear import CudaMatrices
from sonar.ops.cuda_norm import RmsNorms
from sonar.ops.cuda_rope import RopeKVWrite
from sonar.ops.cuda_sample import CudaSample


def build(device: torch.device, dtype: torch.dtype) -> OpTable:
    """The ops that compute in `dtype` on `device`."""
    has_pdl = supports_dependent_launch(device)
    norms = RmsNorms(has_pdl=has_pdl)
    matrices = CudaMatrices(device, dtype, has_pdl=has_pdl)
    attention = CudaAttention(device, has_pdl=has_pdl)
    return dataclasses.replace(
        reference.build(device, dtype),
        name="cuda",
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        rope_kv_write=RopeKVWrite(has_pdl=has_pdl).rope_kv_write,
        paged_attention=attention.paged_attention,
        gated_activation=GatedActivations(has_pdl=has_pdl).gated_activation,
        linear=matrices.linear,
        embedding=matrices.embedding,
        sample=CudaSample(has_pdl=has_pdl).sample,
        fused=matrices.fused_ops(attention.rope_attention) if dtype in (torch.bfloat16, torch.float16) else None,
        is_capturable=True,
    )
