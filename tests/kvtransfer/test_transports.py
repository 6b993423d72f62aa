"""Every transport by one contract, between two processes: what is read is what was there, and a fault is told."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest

from sonar.errors import ConfigError
from sonar.kvtransfer.contract import Piece, Reading, ReadState, Region, TransferError, Transport
from sonar.kvtransfer.registry import TRANSPORTS, open_transport
from tests.kvtransfer.holding_process import pattern

SIZE = 4 << 20
NEEDS = {"nixl": "nixl_cu13"}
MEMBERS = [name for name in TRANSPORTS if name not in NEEDS or find_spec(NEEDS[name])]


@dataclass
class _Pair:
    transport: Transport
    memory: np.ndarray
    process: subprocess.Popen[str]
    address: int
    metadata: bytes

    def read(self, pieces: list[tuple[int, int, int]]) -> Reading:
        """(local offset, remote offset, size); waits for the end."""
        base = self.memory.ctypes.data
        reading = self.transport.read("p", [Piece(base + a, self.address + b, size) for a, b, size in pieces])
        deadline_s = time.monotonic() + 30
        while reading.state is ReadState.UNDER_WAY:
            assert time.monotonic() < deadline_s, "a read without an end"
            time.sleep(0.001)
        return reading


@contextlib.contextmanager
def _holding(name: str) -> Iterator[tuple[subprocess.Popen[str], int, bytes]]:
    command = [sys.executable, "-m", "tests.kvtransfer.holding_process", name, str(SIZE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("{"))
        said = json.loads(line)
        yield process, said["address"], bytes.fromhex(said["metadata"])
        process.stdin.close()


@pytest.fixture(params=MEMBERS)
def pair(request: pytest.FixtureRequest) -> Iterator[_Pair]:
    with _holding(request.param) as (process, address, metadata):
        memory = np.zeros(SIZE, dtype=np.uint8)
        transport = open_transport(request.param, "reader")
        transport.register([Region(memory.ctypes.data, SIZE)])
        yield _Pair(transport, memory, process, address, metadata)
        transport.close()


def test_what_is_read_is_what_was_there_and_a_dead_process_fails(pair: _Pair) -> None:
    pair.transport.connect("p", pair.metadata)
    expected = pattern(SIZE)
    step = 1000  # more pieces than one call of the kernel takes, in another order
    pieces = [(i * step, (SIZE // step - 1 - i) * step, step) for i in range(SIZE // step)]
    assert pair.read(pieces).state is ReadState.DONE
    for local, remote, size in pieces[::97]:
        assert np.array_equal(pair.memory[local : local + size], expected[remote : remote + size])
    assert pair.read([(0, 0, SIZE)]).state is ReadState.DONE
    assert np.array_equal(pair.memory, expected)
    pair.process.kill()
    pair.process.wait()
    reading = pair.read([(0, 0, SIZE)])
    assert reading.state in (ReadState.FAILED, ReadState.LOST) and reading.error
    pair.transport.disconnect("p")
    pair.transport.disconnect("p")


def test_metadata_of_another_kind_is_refused(pair: _Pair) -> None:
    with pytest.raises(TransferError):
        pair.transport.connect("p", b"junk")


def test_a_process_id_that_another_has_now_is_refused() -> None:
    with _holding("shm") as (_, _, first), _holding("shm") as (_, _, second):
        import msgspec

        one, two = msgspec.msgpack.decode(first), msgspec.msgpack.decode(second)
        transport = open_transport("shm", "reader")
        with pytest.raises(TransferError, match=r"cannot be read|another one than it was"):
            transport.connect("p", msgspec.msgpack.encode([two[0], one[1], one[2]]))
        transport.close()


@pytest.mark.skipif("nixl" in MEMBERS, reason="NIXL is installed")
def test_a_library_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sonar-cluster\[nixl\].*choose 'shm'"):
        open_transport("nixl", "x")
