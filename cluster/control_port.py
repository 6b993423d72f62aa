"""Where a head listens for agents and leads: the port that is configured, or, if any will do, the one it had before.

Agents and leads that a killed head has left look for their next head there. Called by the head.
"""

from __future__ import annotations

import contextlib
import socket

from cluster.config import ClusterConfig
from sonar.transport import Address
from sonar.transport_server import Server

_FILE = "control.port"


def bind_control(server: Server, config: ClusterConfig) -> Address:
    """Binds the server.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """
    host, port = config.network.control_host, config.network.control_port
    file = config.state_dir / _FILE
    if not port:
        with contextlib.suppress(OSError, ValueError):
            last = int(file.read_text())
            port = last if _is_free(Address(host, last)) else 0
    address = server.bind(host, port)
    file.write_text(str(address.port))
    return address


def _is_free(address: Address) -> bool:
    """Whether a server could listen there, connections of an ended one notwithstanding."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
