"""Messages between the head that leads and those that stand by: what has been answered, so that each could go on.

Frozen tagged msgspec structs, one closed union a direction. See `cluster.journal_mirror`.
"""

from __future__ import annotations

import msgspec


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class JournalRow(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A change of the journal of answers.

    Attributes:
        record: of a new answer (MessagePack of an `AnswerRecord`); empty for later rows.
        events, output: of an update, as they are stored. ended_unix_s: with the last one.
        is_forgotten: the answer is of no more use.
    """

    answer_id: str
    record: bytes = b""
    events: bytes = b""
    output: bytes = b""
    ended_unix_s: float | None = None
    is_forgotten: bool = False


# --- standby -> leader ----------------------------------------------------------------------------------------------


class Follow(_Message, frozen=True, kw_only=True):
    """Standby -> leader: first message on each connection. Answered by `Rows`: all there is, then each change."""


class Acked(_Message, frozen=True, kw_only=True):
    """Standby -> leader: the rows up to that number are written."""

    number: int


StandbyToHead = Follow | Acked


# --- leader -> standby ----------------------------------------------------------------------------------------------


class Rows(_Message, frozen=True, kw_only=True):
    """Leader -> standby: what has changed; answered by `Acked`. is_first: forget all that was known before."""

    number: int
    rows: list[JournalRow]
    is_first: bool = False


HeadToStandby = Rows
