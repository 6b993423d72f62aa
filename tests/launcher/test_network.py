"""Routes and addresses of this host; other hosts' are in tests/integration/test_hosts.py."""

from __future__ import annotations

import socket

import pytest

from launcher.network import LocalRoute, interface_of, mtu_of, own_addresses, probe_peers, resolve, route_to
from sonar.errors import ConfigError
from sonar.transport import Address


def test_loopback_is_reached_by_loopback() -> None:
    route = route_to(Address("127.0.0.1", 2243))
    assert route.address == "127.0.0.1" and route.is_loopback and route.interface == interface_of("127.0.0.1")
    assert mtu_of(route.interface) > 0 and mtu_of("no-such-interface") == 0
    assert LocalRoute("fd00::1", "eth0").is_loopback is False and LocalRoute("::1", "lo").is_loopback


def test_a_name_is_resolved_or_named() -> None:
    assert (socket.AF_INET, "127.0.0.1") in resolve("localhost", 1)
    with pytest.raises(ConfigError, match=r"the name 'no\.such\.name\.invalid' means nothing on this host"):
        route_to(Address("no.such.name.invalid", 2243))


def test_a_foreign_address_is_refused_with_the_own_ones() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.9 is no address of this host; its own: .*127\.0\.0\.1"):
        interface_of("203.0.113.9")
    assert any(route.address == "127.0.0.1" for route in own_addresses())


def test_a_probe_needs_no_listener_and_tells_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        seconds = probe_peers({"here": "127.0.0.1"}, timeout_s=1.0)
    assert 0 <= seconds["here"] < 1.0
    # A link-local address without its link leads nowhere.
    assert probe_peers({"nobody": "fe80::1"}, timeout_s=0.2) == {"nobody": -1.0}
    assert probe_peers({}) == {}
