"""Choosing a backend: by device, by name, and what happens when it cannot run."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch

from sonar.errors import ConfigError
from sonar.ops import reference, registry
from sonar.ops.registry import OpsUnavailable, select_ops
from sonar.ops.table import OpTable

CPU = torch.device("cpu")


@pytest.fixture
def cpu_backend(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A backend "cpu" in a module of its own; tests give it `build`."""
    module = types.ModuleType("tests.ops.pretended_backend")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.BACKENDS, "cpu", f"{module.__name__}:build")
    return module


def _refuse(device: torch.device, dtype: torch.dtype) -> OpTable:
    raise OpsUnavailable("this processor has no AVX2")


def test_auto_takes_the_devices_own(cpu_backend: types.ModuleType) -> None:
    table = reference.build(CPU, torch.float32)
    cpu_backend.build = lambda device, dtype: table
    assert select_ops(CPU, torch.float32) is table
    assert select_ops(CPU, torch.float32, "reference") is not table


def test_auto_falls_back_and_says_why(cpu_backend: types.ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    cpu_backend.build = _refuse
    with caplog.at_level(logging.WARNING, "sonar.ops.registry"):
        assert select_ops(CPU, torch.float32).name == "reference"
    (record,) = caplog.records
    assert "this processor has no AVX2" in record.getMessage() and "not batch-invariant" in record.getMessage()


def test_a_device_without_kernels_gets_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sonar.ops.registry"):
        assert select_ops(torch.device("meta"), torch.float32).name == "reference"
    assert "there are no kernels for meta" in caplog.text


def test_a_named_backend_that_cannot_run_is_an_error(cpu_backend: types.ModuleType) -> None:
    cpu_backend.build = _refuse
    with pytest.raises(ConfigError, match="ops='cpu' cannot run on cpu: this processor has no AVX2; use ops='auto'"):
        select_ops(CPU, torch.float32, "cpu")


def test_a_broken_backend_is_not_hidden(cpu_backend: types.ModuleType) -> None:
    with pytest.raises(AttributeError):
        select_ops(CPU, torch.float32)


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"ops='triton' is no backend; choose one of \['auto', 'reference'"):
        select_ops(CPU, torch.float32, "triton")
