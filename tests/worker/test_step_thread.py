"""The thread of steps: order, results, errors, end."""

from __future__ import annotations

import threading

import pytest

from sonar.worker.step_thread import StepThread


def test_calls_run_in_order_in_one_thread_that_was_entered_first():
    log = []
    thread = StepThread("steps", lambda: log.append("enter"))
    calls = [thread.submit(lambda i=i: (log.append(i), threading.get_ident())[1]) for i in range(5)]
    idents = {call.result() for call in calls}
    thread.close()
    assert log == ["enter", 0, 1, 2, 3, 4]
    assert len(idents) == 1 and threading.get_ident() not in idents


def test_an_error_goes_to_whoever_waits_and_the_thread_lives_on():
    thread = StepThread("steps", lambda: None)
    bad, good = thread.submit(lambda: 1 // 0), thread.submit(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        bad.result()
    assert good.result() == 7
    assert bad.is_done and good.is_done
    thread.close()


def test_close_ends_the_thread_after_what_is_queued():
    gate = threading.Event()
    thread = StepThread("steps", lambda: None)
    waiting, last = thread.submit(lambda: gate.wait(10)), thread.submit(lambda: "last")
    assert not last.is_done
    gate.set()
    thread.close()
    assert (waiting.result(), last.result()) == (True, "last")
    assert not thread._thread.is_alive()


def test_a_thread_that_cannot_be_entered_fails_its_calls_instead_of_hanging_them():
    thread = StepThread("steps", lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            thread.submit(lambda: 1).result()
    thread.close()
