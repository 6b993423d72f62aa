"""The event log: net changes only, so that it is bounded unread."""

from __future__ import annotations

from sonar.kvcache.event_log import KVEventLog
from sonar.messages import BlockRemoved, BlockStored


def test_changes_come_in_order_and_once() -> None:
    log = KVEventLog()
    log.stored(b"a", b"root")
    log.stored(b"b", b"a")
    assert log.take() == [BlockStored(b"a", b"root"), BlockStored(b"b", b"a")]
    log.removed(b"b")
    assert log.take() == [BlockRemoved(b"b")]
    assert log.take() == []


def test_what_came_and_went_is_not_told() -> None:
    log = KVEventLog()
    log.stored(b"a", b"root")
    log.removed(b"a")
    assert log.take() == []


def test_what_went_and_came_back_is_not_told() -> None:
    log = KVEventLog()
    log.stored(b"a", b"root")
    log.take()
    log.removed(b"a")
    log.stored(b"a", b"root")
    assert log.take() == []
    log.removed(b"a")
    assert log.take() == [BlockRemoved(b"a")]
