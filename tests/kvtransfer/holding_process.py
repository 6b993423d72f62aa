"""A process whose memory others read: `python -m tests.kvtransfer.holding_process TRANSPORT SIZE`.

Prints one line of JSON (address, metadata), then waits for the end of its input. Called by the transports' tests.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from sonar.kvtransfer.contract import Region
from sonar.kvtransfer.registry import open_transport


def pattern(size: int) -> np.ndarray:
    """Bytes by which an offset is known."""
    return (np.arange(size, dtype=np.uint64) * 2654435761 >> np.uint64(7)).astype(np.uint8)


def main(name: str, size: int) -> None:
    """Serves until its input ends."""
    memory = pattern(size)
    transport = open_transport(name, f"holder-{name}")
    transport.register([Region(memory.ctypes.data, size)])
    print(json.dumps({"address": memory.ctypes.data, "metadata": transport.metadata().hex()}), flush=True)
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
