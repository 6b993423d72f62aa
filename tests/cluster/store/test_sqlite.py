"""What is the embedded store's own: the contract is tested for both in test_contract.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.store.contract import StoreUnavailableError
from cluster.store.sqlite import SqliteStore


def test_a_full_disk_is_a_store_that_is_away(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    store.put("kept", b"old")
    lease = store.lease(10.0)
    assert store.compare_and_set("leased", None, b"mine", lease)
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    for write in (
        lambda: store.put("kept", bytes(100_000)),
        lambda: store.put("leased", bytes(100_000)),
        lambda: store.compare_and_set("new", None, bytes(100_000)),
    ):
        with pytest.raises(StoreUnavailableError, match=r"store.db: database or disk is full; free space"):
            write()
    assert store.items("") == {"kept": b"old", "leased": b"mine"}
    store._connection.execute("PRAGMA max_page_count = 100000")
    store.put("kept", b"new")
    assert store.get("kept") == b"new"
    store.close()
