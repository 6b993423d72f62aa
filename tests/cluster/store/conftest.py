"""Stores for the contract's tests: every member, fresh."""

from __future__ import annotations

import itertools

import pytest

from cluster.store.registry import open_store
from cluster.store.settings import StoreConfig
from tests.cluster.store.etcd_server import ETCD, EtcdServers

_numbers = itertools.count()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory):
    """One plain etcd server for all tests; they differ in their prefix."""
    if ETCD is None:
        pytest.skip("etcd is not installed; apt-get install etcd-server")
    servers = EtcdServers(tmp_path_factory.mktemp("etcd"))
    try:
        yield servers.start()
    finally:
        servers.stop()


@pytest.fixture(params=["sqlite", "etcd"])
def open_client(request, tmp_path):
    """Opens clients of one empty store: of etcd each call another, of the embedded store the only one."""
    opened = []
    config = StoreConfig()
    if request.param == "etcd":
        config = request.getfixturevalue("etcd").config(prefix=f"t{next(_numbers)}/")

    def open_one():
        if not opened or config.kind == "etcd":
            opened.append(open_store(config, tmp_path))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()
