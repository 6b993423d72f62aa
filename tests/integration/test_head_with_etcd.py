"""A head whose store is a real etcd: what it remembers survives its host, and etcd's absence stops nothing."""

from __future__ import annotations

import pytest

from cluster.store.contract import StoreUnavailableError
from tests.cluster.store.etcd_server import EtcdServers, needs_etcd
from tests.fakes import fake_output
from tests.integration.cluster_of_one import Client, kill, ready, running_head, until, worker_pid

pytestmark = needs_etcd


@pytest.fixture
def etcd(tmp_path):
    (tmp_path / "etcd").mkdir()
    servers = EtcdServers(tmp_path / "etcd")
    try:
        yield servers.start()
    finally:
        servers.stop()


async def test_a_head_on_another_host_goes_on_with_new_incarnations(tmp_path, etcd) -> None:
    last = 0
    for host in ("one", "two"):
        async with running_head(tmp_path / host, store=etcd.config()) as head:
            await ready(head)
            assert head.control.state.replicas["fake-0"].incarnation > last
            last = head.control.state.replicas["fake-0"].incarnation
    assert not list(tmp_path.rglob("head.db")), "nothing is remembered on the host"


async def test_etcd_gone_changes_nothing_for_traffic_and_restarts(tmp_path, etcd) -> None:
    store = etcd.config(timeout_s=2.0)
    async with running_head(tmp_path / "head", store=store) as head:
        await ready(head)
        etcd.kill(0)
        client = Client(head, "r", [1], 40)
        await client.has(3)
        kill(worker_pid(head))
        await client.end()
        assert client.tokens == fake_output([1], 3, 40)
        await until(lambda: head.control.state.replicas["fake-0"].incarnation == 2, "started again")
    with pytest.raises(StoreUnavailableError, match="no etcd endpoint answered"):
        async with running_head(tmp_path / "other", store=store):
            pass
