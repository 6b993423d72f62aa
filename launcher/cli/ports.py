"""Whether a server could listen on an address, said before anything heavy is installed or loaded.

Standard library only: run_cluster.sh runs this file with the system's Python before an environment exists
(`python -m launcher.cli.ports HOST PORT`); `sonar serve` calls `port_problem`. Does not keep the port.
"""

from __future__ import annotations

import errno
import socket
import sys


def port_problem(host: str, port: int) -> str | None:
    """Why nothing can listen on host:port, with the remedy; None when it can. Port 0 asks for any free one."""
    if not 0 <= port <= 65535:
        return f"--port {port} is no port; give 0 to 65535"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"--host {host!r} is no address of this machine ({error}); give 127.0.0.1, 0.0.0.0 or one of its own"
    family, kind, protocol, _, address = found[0]
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no user
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return _explain(error, host, port)
    return None


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what listens there or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine; give 127.0.0.1, 0.0.0.0 or one of its own"
    return f"cannot listen on {host}:{port}: {error.strerror}; choose others with --host and --port"


def main() -> int:
    """Prints the problem on stderr. Returns 0 when the port is free, 2 when it is not."""
    host, text = sys.argv[1:3]
    problem = port_problem(host, int(text)) if text.isdecimal() else f"--port {text!r} is no number; give 0 to 65535"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
