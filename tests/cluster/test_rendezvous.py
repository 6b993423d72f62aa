"""The ranks' store: waits, compare-and-set, incarnations, limits."""

from __future__ import annotations

from cluster.rendezvous import MAX_VALUE_BYTES, RankReply, Rendezvous
from sonar.messages import StoreAdd, StoreDelete, StoreRead, StoreReply, StoreSize, StoreWrite


def write(number, key, value, expected=None, incarnation=1):
    return StoreWrite(incarnation=incarnation, number=number, key=key, value=value, expected=expected)


def read(number, *keys, timeout_s=0.0, incarnation=1):
    return StoreRead(incarnation=incarnation, number=number, keys=list(keys), timeout_s=timeout_s)


def ask(store, request, rank=0, now=0.0, incarnation=1):
    return store.handle("r-0", incarnation, rank, request, now)


def test_a_read_waits_for_its_keys_and_is_woken_by_the_last():
    store = Rendezvous()
    assert ask(store, read(7, "a", "b", timeout_s=5.0), rank=2) == []
    assert ask(store, write(1, "a", b"1")) == [RankReply(0, StoreReply(number=1, values=[b"1"]))]
    woken = ask(store, write(2, "b", b"2"), rank=1)
    assert woken == [
        RankReply(1, StoreReply(number=2, values=[b"2"])),
        RankReply(2, StoreReply(number=7, values=[b"1", b"2"])),
    ]
    assert store.tick(100.0) == []


def test_a_read_whose_time_is_up_says_what_is_missing():
    store = Rendezvous()
    ask(store, write(1, "a", b"1"))
    assert ask(store, read(2, "a", "b")) == [RankReply(0, StoreReply(number=2, missing=["b"]))]
    assert ask(store, read(3, "b", timeout_s=2.0), rank=3, now=10.0) == []
    assert store.tick(11.9) == []
    assert store.tick(12.0) == [("r-0", 1, RankReply(3, StoreReply(number=3, missing=["b"])))]
    assert store.tick(13.0) == []


def test_counters_compare_and_set_and_delete():
    store = Rendezvous()
    assert [ask(store, StoreAdd(incarnation=1, number=1, key="n", amount=n))[0].message.count for n in (2, 3)] == [2, 5]
    assert ask(store, read(2, "n"))[0].message.values == [b"5"]
    assert ask(store, write(3, "k", b"new", expected=b""))[0].message.values == [b"new"]
    assert ask(store, write(4, "k", b"other", expected=b"wrong"))[0].message.values == [b"new"]
    assert ask(store, write(5, "k", b"last", expected=b"new"))[0].message.values == [b"last"]
    assert ask(store, StoreSize(incarnation=1, number=6))[0].message.count == 2
    deleted = [ask(store, StoreDelete(incarnation=1, number=7, key="k"))[0].message.count for _ in range(2)]
    assert deleted == [1, 0]


def test_an_incarnation_finds_nothing_of_the_one_before():
    store = Rendezvous()
    ask(store, write(1, "a", b"old"))
    ask(store, read(2, "never", timeout_s=9.0))
    assert ask(store, read(1, "a", incarnation=2), incarnation=2)[0].message.missing == ["a"]
    assert store.tick(100.0) == [], "its waits are over too"
    store.forget("r-0")
    assert store.num_replicas == 0


def test_a_value_over_the_limit_is_not_kept():
    store = Rendezvous()
    assert ask(store, write(1, "a", b"x" * (MAX_VALUE_BYTES + 1)))[0].message.values == [b""]
    assert ask(store, read(2, "a"))[0].message.missing == ["a"]
