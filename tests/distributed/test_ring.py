"""The shared-memory ring: order, wrap-around, slow and damaged frames, real processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time

import pytest

from sonar.distributed.ring import RingReader, RingWriter
from sonar.errors import ProtocolError

CAPACITY = 4096


@pytest.fixture
def ring():
    writer = RingWriter(2, CAPACITY)
    readers = [RingReader(os.getpid(), writer.descriptor, number, CAPACITY) for number in range(2)]
    yield writer, readers
    for end in (writer, *readers):
        end.close()


def test_every_reader_gets_every_frame_in_order_over_many_rounds(ring):
    writer, readers = ring
    draw = random.Random(3)
    for _ in range(500):
        frames = [draw.randbytes(draw.choice((0, 1, 7, 300, 1500))) for _ in range(2)]
        for frame in frames:
            writer.write(frame, 1.0)
        for reader in readers:
            assert [reader.read(1.0), reader.read(1.0)] == frames
            assert reader.read(0.0) is None
    assert writer.unread_bytes() == 0


def test_what_one_reader_has_not_taken_is_never_overwritten(ring):
    writer, (fast, slow) = ring
    for _ in range(4):
        writer.write(b"a" * 1000, 1.0)
        assert fast.read(1.0) == b"a" * 1000
    with pytest.raises(ProtocolError, match=r"readers \[1\] took nothing"):
        writer.write(b"b" * 700, 0.05)
    assert slow.read(1.0) == b"a" * 1000
    writer.write(b"b" * 700, 0.05)
    assert fast.read(1.0) == b"b" * 700
    assert [slow.read(1.0) for _ in range(4)] == [b"a" * 1000] * 3 + [b"b" * 700]


def test_a_full_ring_goes_on_when_the_reader_does(ring):
    writer, readers = ring
    frames = [bytes([n]) * 1000 for n in range(40)]
    taken = [[], []]

    def read(number):
        while len(taken[number]) < len(frames):
            frame = readers[number].read(1.0)
            assert frame is not None
            taken[number].append(frame)
            time.sleep(0.001 * number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for frame in frames:
        writer.write(frame, 5.0)
    for thread in threads:
        thread.join(10)
    assert taken == [frames, frames]


def test_a_frame_larger_than_the_ring_goes_through_in_pieces(ring):
    writer, readers = ring
    frame = random.Random(1).randbytes(10 * CAPACITY + 17)
    taken = []
    threads = [threading.Thread(target=lambda r=reader: taken.append(r.read(5.0))) for reader in readers]
    for thread in threads:
        thread.start()
    writer.write(frame, 5.0)
    for thread in threads:
        thread.join(10)
    assert taken == [frame, frame]


def test_damaged_frames_are_told(ring):
    writer, readers = ring
    writer.write(b"hello", 1.0)
    writer._ring.put(10, b"?")
    with pytest.raises(ProtocolError, match="damaged"):
        readers[0].read(1.0)


def _echo(pid, descriptor, answer_pid_descriptor, count):
    reader = RingReader(pid, descriptor, 0, CAPACITY)
    answers = RingWriter(1, CAPACITY)
    answer_pid_descriptor.send((os.getpid(), answers.descriptor))
    for _ in range(count):
        frame = reader.read(10.0)
        assert frame is not None
        answers.write(frame[::-1], 1.0)
    answer_pid_descriptor.recv()


def test_between_processes():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    writer = RingWriter(1, CAPACITY)
    process = context.Process(target=_echo, args=(os.getpid(), writer.descriptor, theirs, 100))
    process.start()
    pid, descriptor = ours.recv()
    reader = RingReader(pid, descriptor, 0, CAPACITY)
    for n in range(100):
        writer.write(b"%d!" % n, 1.0)
        answer = reader.read(10.0)
        assert answer == (b"%d!" % n)[::-1]
    ours.send("done")
    process.join(10)
    assert process.exitcode == 0
