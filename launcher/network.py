"""Which of this host's addresses and interfaces lead to another host: the kernel's routing answers, nothing is sent.

The one place where this is decided, for control, collectives and KV transfers alike; `--address` of `sonar join` and
`network.host` of a cluster file override it. Knows no cluster. Called by the agent, `sonar head` and the preflight.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import selectors
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple, cast

import psutil

from sonar.errors import ConfigError
from sonar.transport import Address

# Addresses that documentation owns (RFC 5737, RFC 3849): never a real host, so only the default route leads there.
_ELSEWHERE = (Address("192.0.2.1", 9), Address("2001:db8::1", 9))


# "discard": hardly ever listened to.
_PROBE_PORT = 9


class LocalRoute(NamedTuple):
    """How traffic leaves this host. address: numeric, as the other side sees it (unless it is translated)."""

    address: str
    interface: str

    @property
    def is_loopback(self) -> bool:
        """Whether it does not leave this host at all."""
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback

    def __str__(self) -> str:
        return f"{self.address} on {self.interface}"


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Family and numeric address of each meaning of a name.

    Raises:
        ConfigError: it has none here.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(
            f"the name {host!r} means nothing on this host ({error}); give an address, or add the name to DNS or "
            "/etc/hosts",
            param="head",
        ) from error
    return [(family, str(address[0])) for family, _, _, _, address in found]


def route_to(head: Address) -> LocalRoute:
    """The address and interface by which this host reaches another.

    Raises:
        ConfigError: the name means nothing, or no route leads there.
    """
    problems = []
    for family, numeric in resolve(head.host, head.port):
        try:
            address = _source_address(family, numeric, head.port)
        except OSError as error:
            problems.append(f"{numeric}: {error.strerror}")
            continue
        return LocalRoute(address, interface_of(address))
    raise ConfigError(
        f"no route from this host to {head} ({'; '.join(problems)}); its interfaces: {_listed(own_addresses())}",
        param="head",
    )


def outward_address() -> LocalRoute:
    """The address that other hosts are to use for this one: that of the default route, or the only one there is.

    Raises:
        ConfigError: there is none, or the choice is a person's.
    """
    for elsewhere in _ELSEWHERE:
        family = socket.AF_INET6 if ":" in elsewhere.host else socket.AF_INET
        try:
            address = _source_address(family, elsewhere.host, elsewhere.port)
        except OSError:
            continue
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return LocalRoute(address, interface_of(address))
    routes = [route for route in own_addresses() if not _is_local_only(route)]
    if len(routes) == 1:
        return routes[0]
    what = f"several addresses and no default route: {_listed(routes)}" if routes else "no address that others reach"
    raise ConfigError(f"this host has {what}; set host under [network] in the cluster file", param="host")


def own_addresses() -> list[LocalRoute]:
    """Every address of every interface that is up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        LocalRoute(entry.address, name)
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        if name in up and entry.family in families
    ]


def interface_of(address: str) -> str:
    """The interface that has an address.

    Raises:
        ConfigError: none of this host's has.
    """
    wanted = address.partition("%")[0]
    for route in own_addresses():
        if route.address.partition("%")[0] == wanted:
            return route.interface
    raise ConfigError(
        f"{address} is no address of this host; its own: {_listed(own_addresses())}",
        param="address",
    )


def _source_address(family: socket.AddressFamily, numeric: str, port: int) -> str:
    """A connected UDP socket sends nothing, but has chosen its route."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((numeric, port))
        return str(probe.getsockname()[0])


def _is_local_only(route: LocalRoute) -> bool:
    address = ipaddress.ip_address(route.address.partition("%")[0])
    return address.is_loopback or address.is_link_local


def _listed(routes: list[LocalRoute]) -> str:
    return ", ".join(f"{route.interface}={route.address}" for route in routes) or "none"


def mtu_of(interface: str) -> int:
    """Largest packet of an interface, in bytes; 0 when it has gone."""
    stats = psutil.net_if_stats().get(interface)
    return int(stats.mtu) if stats is not None else 0


def probe_peers(peers: Mapping[str, str], timeout_s: float = 3.0) -> dict[str, float]:
    """Which hosts answer: node id -> seconds until a TCP packet came back, -1 for none.

    A connection to a port where nothing listens is refused by the other host's kernel: an answer, with no listener to
    open for it. One that is dropped on the way, or has no route, is not.
    """
    seconds = dict.fromkeys(peers, -1.0)
    began: dict[str, float] = {}
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for name, address in peers.items():
            probe = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            opened.callback(probe.close)
            probe.setblocking(False)
            began[name] = time.monotonic()
            code = probe.connect_ex((address, _PROBE_PORT))
            if code == errno.ECONNREFUSED:
                seconds[name] = time.monotonic() - began[name]
            elif code == errno.EINPROGRESS:
                selector.register(probe, selectors.EVENT_WRITE, name)
        deadline_s = time.monotonic() + timeout_s
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                probe = cast(socket.socket, key.fileobj)
                selector.unregister(probe)
                code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code in (0, errno.ECONNREFUSED):
                    seconds[key.data] = time.monotonic() - began[key.data]
    return seconds
