"""What every store promises, tried with each member; etcd's is a real server."""

from __future__ import annotations

import threading
import time

from cluster.store.contract import Change, News


def wait_for_news(watch, timeout_s: float = 10.0) -> News:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if news := watch.next(1.0):
            return news
    raise AssertionError("no news")


def test_pairs_are_read_as_written(open_client) -> None:
    store, other = open_client(), open_client()
    assert store.get("a/1") is None and store.items("") == {}
    store.put("a/1", b"one")
    store.put("a/1", b"two")
    store.put("a/2", b"")
    store.put("b/ü", bytes(range(256)))
    assert other.get("a/1") == b"two" and other.get("a/2") == b"" and other.get("a") is None
    assert other.items("a/") == {"a/1": b"two", "a/2": b""}
    assert list(other.items("")) == ["a/1", "a/2", "b/ü"] and other.get("b/ü") == bytes(range(256))


def test_compare_and_set(open_client) -> None:
    store, other = open_client(), open_client()
    assert store.compare_and_set("k", None, b"1")
    assert not other.compare_and_set("k", None, b"2") and not other.compare_and_set("k", b"3", b"2")
    assert other.compare_and_set("k", b"1", b"2") and store.get("k") == b"2"
    assert not store.compare_and_set("other", b"1", b"2") and store.get("other") is None
    assert not store.compare_and_set("k", b"1", None) and store.get("k") == b"2"
    assert store.compare_and_set("k", b"2", None) and other.get("k") is None
    assert store.compare_and_set("k", None, b"") and not store.compare_and_set("k", None, b"4")


def test_of_many_only_one_sets(open_client) -> None:
    stores = [open_client() for _ in range(6)]
    won = []

    def work(number: int) -> None:
        for step in range(5):
            if stores[number].compare_and_set(f"step/{step}", None, str(number).encode()):
                won.append((step, number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(step for step, _ in won) == list(range(5))
    assert {f"step/{step}": str(number).encode() for step, number in won} == stores[0].items("step/")


def test_a_lease_takes_its_keys_with_it(open_client) -> None:
    store, other = open_client(), open_client()
    lease = store.lease(1.0)
    assert store.compare_and_set("a", None, b"1", lease) and store.compare_and_set("b", None, b"1", lease)
    store.put("b", b"2")  # a plain write keeps it
    for _ in range(3):
        time.sleep(0.5)
        assert lease.refresh() and other.get("a") == b"1"
    deadline = time.monotonic() + 10
    while other.get("a") is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert other.get("a") is None and other.get("b") == b"2"
    assert not lease.refresh() and not store.compare_and_set("c", None, b"1", lease)
    lease.revoke()


def test_a_revoked_lease_is_over_at_once(open_client) -> None:
    store = open_client()
    lease = store.lease(60.0)
    assert store.compare_and_set("a", None, b"1", lease)
    lease.revoke()
    assert store.get("a") is None and store.items("") == {} and not lease.refresh()


def test_a_watch_tells_all_then_changes(open_client) -> None:
    store, other = open_client(), open_client()
    store.put("w/a", b"1")
    store.put("x", b"1")
    watch = other.watch("w/")
    assert watch.next(1.0) == News(True, [Change("w/a", b"1")])
    assert watch.next(0.2) is None
    store.put("w/b", b"")
    store.put("y", b"1")
    store.compare_and_set("w/a", b"1", None)
    changes = []
    while len(changes) < 2:
        news = wait_for_news(watch)
        assert not news.is_reset
        changes += news.changes
    assert changes == [Change("w/b", b""), Change("w/a", None)]
    watch.close()


def test_a_watch_that_waits_is_woken(open_client) -> None:
    store, other = open_client(), open_client()
    watch = other.watch("w/")
    assert watch.next(1.0) == News(True, [])
    timer = threading.Timer(0.3, store.put, ("w/a", b"1"))
    timer.start()
    began = time.monotonic()
    assert watch.next(20.0) == News(False, [Change("w/a", b"1")])
    assert time.monotonic() - began < 10
    timer.join()
    watch.close()


def test_a_watch_sees_a_lease_end(open_client) -> None:
    store, other = open_client(), open_client()
    watch = other.watch("w/")
    watch.next(1.0)
    assert store.compare_and_set("w/a", None, b"1", store.lease(1.0))
    assert wait_for_news(watch).changes == [Change("w/a", b"1")]
    assert wait_for_news(watch).changes == [Change("w/a", None)]
    watch.close()
