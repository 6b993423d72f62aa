"""Election over each store: one leader at a time, whatever dies or cannot be reached."""

from __future__ import annotations

import time

from cluster.store.contract import StoreUnavailableError
from cluster.store.election import SAFE_SHARE, Election
from cluster.store.sqlite import SqliteStore
from tests.cluster.store.etcd_server import EtcdServers, needs_etcd

TTL_S = 2.0


def test_the_first_leads_until_it_resigns(open_client) -> None:
    a, b = (Election(open_client(), "leader", name, TTL_S, time.monotonic) for name in (b"a", b"b"))
    assert a.leader() is None
    assert a.tick() and not b.tick() and a.tick()
    assert b.leader() == b"a" and a.is_leader and not b.is_leader
    a.resign()
    assert not a.is_leader and b.tick() and b.leader() == b"b" and not a.tick()
    a.resign()
    assert b.tick()


def test_a_silent_leader_is_followed_after_its_lease_never_before(open_client) -> None:
    a, b = (Election(open_client(), "leader", name, TTL_S, time.monotonic) for name in (b"a", b"b"))
    assert a.tick()
    began = time.monotonic()
    while not b.tick():
        assert time.monotonic() < began + 15
        time.sleep(0.1)
    assert not a.is_leader, "it knew before the other led"
    assert time.monotonic() - began >= TTL_S * SAFE_SHARE
    assert not a.tick() and b.leader() == b"b"


class MovedClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_leader_without_a_store_leads_as_long_as_promised(tmp_path) -> None:
    clock, store = MovedClock(), SqliteStore(tmp_path / "db", lambda: 0.0)
    election = Election(store, "leader", b"a", 10.0, clock)
    assert election.tick() and election.interval_s == 2.5

    def refuse(*_: object) -> bool:
        raise StoreUnavailableError("away")

    election._lease.refresh = refuse
    clock.now += 10.0 * SAFE_SHARE - 0.1
    assert election.tick()
    clock.now += 0.2
    assert not election.tick()
    del election._lease.refresh
    assert election.tick(), "the store is back, and nobody else had come"
    store.close()


def test_time_that_passes_during_the_call_counts(tmp_path) -> None:
    clock, store = MovedClock(), SqliteStore(tmp_path / "db", lambda: 0.0)
    election = Election(store, "leader", b"a", 10.0, clock)
    real = store.compare_and_set

    def slow(*arguments: object) -> bool:
        clock.now += 9.5
        return real(*arguments)

    store.compare_and_set = slow
    assert not election.tick(), "the answer came too late to rely on"
    store.close()


@needs_etcd
def test_leadership_outlives_etcds_own_leader(tmp_path) -> None:
    servers = EtcdServers(tmp_path, count=3)
    try:
        servers.start()
        store = servers.config()
        from cluster.store.etcd import EtcdStore

        a, b = (Election(EtcdStore(store), "leader", name, 10.0, time.monotonic) for name in (b"a", b"b"))
        assert a.tick() and not b.tick()
        servers.kill(servers.leader())
        for _ in range(5):
            assert a.tick() and not b.tick()
            time.sleep(0.2)
    finally:
        servers.stop()
