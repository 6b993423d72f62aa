"""The journal of answers as rows that another head can be sent, and a copy of it that is written from such rows.

Functions over the file of `cluster.answer_journal`, for the thread that has its connection.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from cluster.standby_messages import JournalRow


def read_rows(connection: sqlite3.Connection) -> list[JournalRow]:
    """Everything, in an order in which it can be written again."""
    rows = [
        JournalRow(answer_id=answer_id, record=record)
        for answer_id, record in connection.execute("SELECT id, record FROM answers ORDER BY rowid")
    ]
    rows += [
        JournalRow(answer_id=answer_id, events=events, output=output)
        for answer_id, events, output in connection.execute("SELECT answer, events, output FROM updates ORDER BY rowid")
    ]
    rows += [
        JournalRow(answer_id=answer_id, ended_unix_s=ended_unix_s)
        for answer_id, ended_unix_s in connection.execute(
            "SELECT id, ended_unix_s FROM answers WHERE ended_unix_s IS NOT NULL"
        )
    ]
    return rows


def write_rows(connection: sqlite3.Connection, rows: Sequence[JournalRow], *, is_first: bool) -> None:
    """Writes them in one transaction. is_first: what there was is forgotten.

    Raises:
        sqlite3.Error: nothing was written.
    """
    connection.execute("BEGIN")
    try:
        if is_first:
            connection.execute("DELETE FROM answers")
            connection.execute("DELETE FROM updates")
        for row in rows:
            _write(connection, row)
        connection.execute("COMMIT")
    except sqlite3.Error:
        connection.execute("ROLLBACK")
        raise


def _write(connection: sqlite3.Connection, row: JournalRow) -> None:
    if row.is_forgotten:
        connection.execute("DELETE FROM updates WHERE answer = ?", (row.answer_id,))
        connection.execute("DELETE FROM answers WHERE id = ?", (row.answer_id,))
        return
    if row.record:
        connection.execute("INSERT OR REPLACE INTO answers (id, record) VALUES (?, ?)", (row.answer_id, row.record))
    if row.events:
        update = "INSERT INTO updates (answer, events, output) VALUES (?, ?, ?)"
        connection.execute(update, (row.answer_id, row.events, row.output))
    if row.ended_unix_s is not None:
        connection.execute("UPDATE answers SET ended_unix_s = ? WHERE id = ?", (row.ended_unix_s, row.answer_id))
