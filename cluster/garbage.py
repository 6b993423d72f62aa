"""Python's cycle collector in a process that streams: rare full collections, because each stops every stream.

Called once by a head's main and by the simulator's command.
"""

from __future__ import annotations

import gc

# Young objects are looked at as often as to cost under a millisecond; all objects only after some 200 million
# allocations (hours). Records and messages hold no cycles: reference counts free them. Measured with 1,000 simulated
# hosts: a full collection stops the head for 130 ms, and with the default thresholds comes every few seconds of load.
THRESHOLDS = (10_000, 20, 1_000)


def avoid_collection_pauses() -> None:
    """What is loaded now is never looked at again; the rest seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
