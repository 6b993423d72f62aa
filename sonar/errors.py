"""Errors that cross a part's border.

What a user did wrong is a `UserError`: its text names field, value and remedy, and goes to that client alone.
Everything else is ours or a remote part's. Knows nothing of HTTP; the API maps `UserError.code` to a status.
"""

from __future__ import annotations


class SonarError(Exception):
    """Base of every error this project raises on purpose."""


class UserError(SonarError):
    """The caller's fault.

    Args:
        message: what is wrong, with the value, and how to mend it.
        param: the request or configuration field at fault, if one is.
        code: a stable identifier in snake case, e.g. `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(UserError):
    """A setting of a deployment or process is wrong; raised before any process starts."""


class ModelError(UserError):
    """A model cannot be found, read or served: unknown architecture, corrupt file, missing tensor (named)."""


class CapacityError(UserError):
    """The work does not fit: no memory for the KV cache, or a full queue. States what is needed and what there is."""


class ProtocolError(SonarError):
    """A frame that does not follow the protocol: junk, oversized, stale incarnation, gap in a sequence."""


class RemoteError(SonarError):
    """A fault of another process.

    Args:
        message: what happened there.
        node: node id, or empty when unknown.
        rank: global rank of the worker, -1 when it is no worker.
        step: last step that rank had finished, -1 when none.
    """

    def __init__(self, message: str, *, node: str = "", rank: int = -1, step: int = -1) -> None:
        super().__init__(f"{message} (node={node or '?'} rank={rank} last_step={step})")
        self.node = node
        self.rank = rank
        self.step = step
