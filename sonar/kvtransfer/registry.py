"""KV transports by name. Torch-free. Called where an engine is put together."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import cast

from sonar.errors import ConfigError
from sonar.kvtransfer.contract import TransferError, Transport

_logger = logging.getLogger(__name__)

TRANSPORTS: dict[str, str] = {
    "nixl": "sonar.kvtransfer.nixl:NixlTransport",
    "shm": "sonar.kvtransfer.shm:ShmTransport",
}


def open_transport(name: str, process_name: str) -> Transport:
    """A transport.

    Args:
        name: a key of TRANSPORTS. process_name: unique to this start of the process.

    Raises:
        ConfigError: it cannot be had on this host.
    """
    module, _, member = TRANSPORTS[name].partition(":")
    try:
        transport = cast(Transport, getattr(import_module(module), member)(process_name))
    except TransferError as error:
        raise ConfigError(f"kv_transfer={name!r}: {error}; or choose {_others(name)}", param="kv_transfer") from error
    _logger.info("KV blocks move by %s", name)
    return transport


def _others(name: str) -> str:
    return " or ".join(repr(other) for other in TRANSPORTS if other != name)
