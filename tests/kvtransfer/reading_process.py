"""A process that reads another's memory: `python -m tests.kvtransfer.reading_process TRANSPORT SIZE ADDRESS METADATA`.

For each line of its input it reads all there is and prints one line of JSON: state, error, whether the bytes are those
of `holding_process`. Called by the transports' tests between hosts.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from sonar.kvtransfer.contract import Piece, ReadState, Region
from sonar.kvtransfer.registry import open_transport
from tests.kvtransfer.holding_process import pattern


def main(name: str, size: int, address: int, metadata: bytes) -> None:
    """Reads until its input ends."""
    memory = np.zeros(size, dtype=np.uint8)
    transport = open_transport(name, "reader")
    transport.register([Region(memory.ctypes.data, size)])
    transport.connect("p", metadata)
    for _ in sys.stdin:
        memory[:] = 0
        reading = transport.read("p", [Piece(memory.ctypes.data, address, size)])
        while reading.state is ReadState.UNDER_WAY:
            time.sleep(0.001)
        said = {"state": reading.state.value, "error": reading.error, "equal": bool((memory == pattern(size)).all())}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4]))
