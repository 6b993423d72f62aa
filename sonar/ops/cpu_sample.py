"""Drawing tokens on the compiled kernels. Built into its table by `sonar.ops.cpu`."""

from __future__ import annotations

import torch
from torch import Tensor

from sonar.ops import _cpu
from sonar.ops.cpu_rows import as_float32
from sonar.ops.table import SamplingTensors


def sample(logits_SV: Tensor, sampling: SamplingTensors) -> Tensor:
    """See `sonar.ops.table.SampleFn`."""
    logits = as_float32(logits_SV)
    num_rows, vocab = logits.shape
    token_ids_S = torch.empty(num_rows, dtype=torch.int64)
    if sampling.all_greedy:
        _cpu.sample(logits.data_ptr(), vocab, num_rows, vocab, 1, 0, 0, 0, 0, 0, 0, token_ids_S.data_ptr())
        return token_ids_S
    temperature_S, key_S2 = sampling.temperature_S.contiguous(), sampling.key_S2.contiguous()
    filters = (sampling.top_k_S, sampling.top_p_S, sampling.min_p_S, sampling.typical_p_S)
    top_k_S, top_p_S, min_p_S, typical_p_S = (column.contiguous() for column in filters)
    _cpu.sample(
        logits.data_ptr(),
        vocab,
        num_rows,
        vocab,
        0,
        temperature_S.data_ptr(),
        top_k_S.data_ptr(),
        top_p_S.data_ptr(),
        min_p_S.data_ptr(),
        typical_p_S.data_ptr(),
        key_S2.data_ptr(),
        token_ids_S.data_ptr(),
    )
    return token_ids_S
