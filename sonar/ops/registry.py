"""Which backend's ops a process uses: one literal dict of name -> builder, resolved once at start and logged.

A builder is `build(device, dtype[, activations]) -> OpTable`; its module is imported only when it is chosen, so that a
host without that hardware or compiler needs none of it. Called by the worker at start.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

import torch

from sonar.config import ActivationMode
from sonar.errors import ConfigError, SonarError
from sonar.ops.table import OpTable

_logger = logging.getLogger(__name__)

OpTableBuilder = Callable[..., OpTable]

# A backend of a device bears the name of torch's device type: `auto` takes it by that name.
BACKENDS: dict[str, str] = {
    "reference": "sonar.ops.reference:build",
    "cpu": "sonar.ops.cpu:build",
    "cuda": "sonar.ops.cuda:build",
}


class OpsUnavailable(SonarError):  # noqa: N818 (a state of this host, not a mistake)
    """A backend cannot run here; raised by its module at import or by its builder, with the reason in one sentence."""


def select_ops(
    device: torch.device, dtype: torch.dtype, name: str = "auto", activations: ActivationMode = "auto"
) -> OpTable:
    """The ops for a device and a compute dtype.

    Args:
        name: a key of `BACKENDS`; or "auto": the device's own backend, and the reference where there is none or it says
            that it is unavailable (logged with the reason).
        activations: as `EngineConfig.activations`.

    Raises:
        ConfigError: no such backend, or the named one is unavailable here.
    """
    if name == "auto":
        return _build_for_device(device, dtype, activations)
    if name not in BACKENDS:
        raise ConfigError(f"ops={name!r} is no backend; choose one of {['auto', *BACKENDS]}", param="ops")
    try:
        table = _build(name, device, dtype, activations)
    except OpsUnavailable as reason:
        raise ConfigError(f"ops={name!r} cannot run on {device}: {reason}; use ops='auto'", param="ops") from reason
    _logger.info("ops backend %s on %s in %s: asked for", table.name, device, dtype)
    return table


def has_kernels(name: str) -> bool:
    """Whether the backend's module can be imported here."""
    try:
        importlib.import_module(BACKENDS[name].partition(":")[0])
    except OpsUnavailable:
        return False
    return True


def _build_for_device(device: torch.device, dtype: torch.dtype, activations: ActivationMode) -> OpTable:
    if device.type not in BACKENDS:
        table = _build("reference", device, dtype, activations)
        _logger.warning(
            "ops backend %s: there are no kernels for %s; slow, and not batch-invariant", table.name, device
        )
        return table
    try:
        table = _build(device.type, device, dtype, activations)
    except OpsUnavailable as reason:
        table = _build("reference", device, dtype, activations)
        _logger.warning(
            "ops backend %s: %s kernels are unavailable (%s); slow, and not batch-invariant",
            table.name,
            device.type,
            reason,
        )
        return table
    _logger.info("ops backend %s on %s in %s: the device's own", table.name, device, dtype)
    return table


def _build(name: str, device: torch.device, dtype: torch.dtype, activations: ActivationMode) -> OpTable:
    """Hands a builder the mode only where one was asked for: those that have no modes need not know of it."""
    builder = _load_builder(name)
    return builder(device, dtype) if activations == "auto" else builder(device, dtype, activations)


def _load_builder(name: str) -> OpTableBuilder:
    module_name, _, attribute = BACKENDS[name].partition(":")
    builder: OpTableBuilder = getattr(importlib.import_module(module_name), attribute)
    return builder
