"""A host without Triton: the CUDA backend says why it cannot run, and everything else imports."""

from __future__ import annotations

import sys

import pytest
import torch

from sonar.errors import ConfigError
from sonar.ops.registry import select_ops


def test_without_triton_the_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith("sonar.ops.cuda") or name.partition(".")[0] == "triton"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="ops='cuda' cannot run on cuda: triton is not installed; use ops='auto'"):
        select_ops(torch.device("cuda"), torch.bfloat16, "cuda")
