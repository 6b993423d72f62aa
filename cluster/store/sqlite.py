"""The embedded store: one SQLite file in the state directory, for a cluster with one head.

Calls block for a disk write; a head makes one a replica start. Knows nothing of what it keeps.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from sonar.errors import ConfigError


class SqliteStore:
    """Implements `cluster.store.contract.Store`.

    Args:
        path: created with mode 600; write-ahead logging, every write synced.

    Raises:
        ConfigError: the file cannot be opened or is no database.
    """

    def __init__(self, path: Path) -> None:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute("CREATE TABLE IF NOT EXISTS pairs (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"store {path} cannot be opened: {error}; remove a damaged file while no worker runs, or choose "
                "another state directory",
                param="state_dir",
            ) from error

    def put(self, key: str, value: bytes) -> None:
        self._connection.execute(
            "INSERT INTO pairs VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
        )

    def items(self, prefix: str) -> dict[str, bytes]:
        found = self._connection.execute(
            "SELECT key, value FROM pairs WHERE substr(key, 1, ?) = ? ORDER BY key", (len(prefix), prefix)
        )
        return dict(found.fetchall())

    def close(self) -> None:
        self._connection.close()
