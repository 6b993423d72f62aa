"""Which store a head uses, and how to reach it: frozen dataclasses, checked at construction."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sonar.errors import ConfigError

_ENDPOINT = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")


@dataclass(frozen=True)
class StoreConfig:
    """The store of a cluster.

    Attributes:
        kind: "sqlite" keeps a file in the head's state directory; "etcd" is for a store that outlives the head's host.
            The fields below are etcd's.
        endpoints: "http(s)://host:port" of its members, any order.
        prefix: of every key, so that clusters (and others) can share one etcd.
        user, password_file: when etcd's authentication is on.
        ca_file, certificate, private_key: PEM; for https endpoints.
        timeout_s: after which a call gives up, over all endpoints. Longer than etcd takes to elect (1 to 5 s).
    """

    kind: Literal["sqlite", "etcd"] = "sqlite"
    endpoints: tuple[str, ...] = ()
    prefix: str = "sonar/"
    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.kind == "etcd" and not self.endpoints:
            raise ConfigError(
                'endpoints is empty; give those of etcd, e.g. ["http://10.0.0.1:2379"]', param="endpoints"
            )
        for endpoint in self.endpoints:
            if not _ENDPOINT.fullmatch(endpoint):
                raise ConfigError(f"endpoints: {endpoint!r} is no http(s)://host:port", param="endpoints")
        if bool(self.user) != (self.password_file is not None):
            raise ConfigError("user and password_file belong together; give both or neither", param="user")
        if (self.certificate is None) != (self.private_key is None):
            raise ConfigError("certificate and private_key belong together; give both or neither", param="certificate")
        for name in ("password_file", "ca_file", "certificate", "private_key"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ConfigError(f"{name}={str(path)!r} is no file", param=name)
        if not 0 < self.timeout_s < 1e4:
            raise ConfigError(f"timeout_s={self.timeout_s}; must be above 0", param="timeout_s")
