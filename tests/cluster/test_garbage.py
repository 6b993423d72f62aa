"""The collector's settings in a process that streams."""

from __future__ import annotations

import gc

from cluster.garbage import THRESHOLDS, avoid_collection_pauses


def test_what_is_loaded_is_not_looked_at_again_and_cycles_still_go() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        avoid_collection_pauses()
        assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > frozen
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
