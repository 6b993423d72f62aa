"""The embedded store: one SQLite file in the state directory, for a cluster with one head.

Other processes do not see its leases and watches: they end with this one, and so would what they are for. A write waits
for the disk (5 ms on a virtual one). Knows nothing of what it keeps.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Condition

from cluster.store.contract import Change, Lease, News, StoreUnavailableError
from sonar.errors import ConfigError

CHANGES_KEPT = 1000


class SqliteStore:
    """Implements `cluster.store.contract.Store`.

    Args:
        path: created with mode 600; write-ahead logging, every write synced.
        clock: monotonic seconds, for leases.

    Raises:
        ConfigError: the file cannot be opened or is no database.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._path = path
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute("CREATE TABLE IF NOT EXISTS pairs (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"store {path} cannot be opened: {error}; free space on a full disk, remove a damaged file while no "
                "worker runs, or choose another state directory",
                param="state_dir",
            ) from error
        self.clock = clock
        self.changed = Condition()
        self._leases: dict[int, float] = {}
        self._leased: dict[str, tuple[bytes, int]] = {}
        self._next_lease_id = 1
        self._changes: deque[Change] = deque(maxlen=CHANGES_KEPT)
        self._num_changes = 0

    def get(self, key: str) -> bytes | None:
        with self.changed:
            self._expire()
            if key in self._leased:
                return self._leased[key][0]
            row = self._execute("SELECT value FROM pairs WHERE key = ?", (key,)).fetchone()
            return bytes(row[0]) if row else None

    def items(self, prefix: str) -> dict[str, bytes]:
        with self.changed:
            self._expire()
            found = self._execute("SELECT key, value FROM pairs WHERE substr(key, 1, ?) = ?", (len(prefix), prefix))
            pairs = dict(found.fetchall())
            pairs |= {key: value for key, (value, _) in self._leased.items() if key.startswith(prefix)}
            return dict(sorted(pairs.items()))

    def put(self, key: str, value: bytes) -> None:
        with self.changed:
            self._expire()
            self._write(key, value, None)

    def compare_and_set(
        self, key: str, expected: bytes | None, value: bytes | None, lease: Lease | None = None
    ) -> bool:
        with self.changed:
            if self.get(key) != expected or (lease is not None and lease.lease_id not in self._leases):
                return False
            self._write(key, value, lease)
            return True

    def lease(self, ttl_s: float) -> SqliteLease:
        with self.changed:
            lease = SqliteLease(self, self._next_lease_id, ttl_s)
            self._next_lease_id += 1
            self._leases[lease.lease_id] = self.clock() + ttl_s
            return lease

    def watch(self, prefix: str) -> SqliteWatch:
        return SqliteWatch(self, prefix)

    def close(self) -> None:
        self._connection.close()

    def extend(self, lease_id: int, ttl_s: float) -> bool:
        """For `SqliteLease`: a lease lives on (or, with 0 s, ends)."""
        with self.changed:
            self._expire()
            if lease_id not in self._leases:
                return False
            self._leases[lease_id] = self.clock() + ttl_s
            self._expire()
            return True

    def changes_since(self, number: int) -> tuple[int, list[Change] | None]:
        """For `SqliteWatch`, which holds `changed`: the present number and the changes, None when too many followed."""
        self._expire()
        missed = self._num_changes - number
        return self._num_changes, list(self._changes)[-missed:] if 0 < missed <= len(self._changes) else None

    def next_expiry_s(self) -> float:
        """When the next lease ends, for whoever waits."""
        return min(self._leases.values(), default=float("inf"))

    def _write(self, key: str, value: bytes | None, lease: Lease | None) -> None:
        if value is None or lease is not None:
            self._execute("DELETE FROM pairs WHERE key = ?", (key,))
        else:
            self._execute(
                "INSERT INTO pairs VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
            )
        self._leased.pop(key, None)
        if value is not None and lease is not None:
            self._leased[key] = (value, lease.lease_id)
        self._changes.append(Change(key, value))
        self._num_changes += 1
        self.changed.notify_all()

    def _execute(self, statement: str, values: tuple[str | int | bytes, ...]) -> sqlite3.Cursor:
        """Raises `StoreUnavailableError`: a full or broken disk; nothing has changed then."""
        try:
            return self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise StoreUnavailableError(
                f"store {self._path}: {error}; free space on its disk, or mend the disk"
            ) from error

    def _expire(self) -> None:
        now = self.clock()
        ended = {lease_id for lease_id, due_s in self._leases.items() if now >= due_s}
        for lease_id in ended:
            del self._leases[lease_id]
        for key in [key for key, (_, lease_id) in self._leased.items() if lease_id in ended]:
            self._write(key, None, None)


class SqliteLease:
    """Implements `cluster.store.contract.Lease`."""

    def __init__(self, store: SqliteStore, lease_id: int, ttl_s: float) -> None:
        self.lease_id = lease_id
        self._store = store
        self._ttl_s = ttl_s

    def refresh(self) -> bool:
        return self._store.extend(self.lease_id, self._ttl_s)

    def revoke(self) -> None:
        self._store.extend(self.lease_id, 0.0)


class SqliteWatch:
    """Implements `cluster.store.contract.Watch`."""

    def __init__(self, store: SqliteStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._number: int | None = None

    def next(self, timeout_s: float) -> News | None:
        store = self._store
        deadline_s = time.monotonic() + timeout_s
        with store.changed:
            while True:
                number, changes = store.changes_since(self._number or 0)
                if self._number is None or (changes is None and number > self._number):
                    self._number = number
                    return News(True, [Change(key, value) for key, value in store.items(self._prefix).items()])
                self._number = number
                if news := [change for change in changes or () if change.key.startswith(self._prefix)]:
                    return News(False, news)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                store.changed.wait(max(0.0, min(left_s, store.next_expiry_s() - store.clock())))

    def close(self) -> None:
        """Nothing is held."""
