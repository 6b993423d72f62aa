"""Seats in the workers' batch: which are free, and which the workers have yet to be told are.

Called by the scheduler.
"""

from __future__ import annotations


class SlotPool:
    """Owner of the slots 0 .. num_slots - 1.

    A slot given back may be taken again at once: the batch that seats the next request lists it as released, and a
    batch's releases apply before its admissions. Steps under way still use it for the old request, and are done first.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        """Slots to take."""
        return len(self._free)

    def take(self) -> int:
        """A free slot; there must be one."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Frees a slot and puts it on the list for the next batch."""
        self._free.append(slot)
        self._released.append(slot)

    def take_released(self) -> list[int]:
        """Slots given back since the last batch, in order."""
        released, self._released = self._released, []
        return released

    def check(self, taken: list[int]) -> None:
        """Asserts that each slot is free or one of `taken`, once."""
        assert sorted([*self._free, *taken]) == list(range(self._num_slots)), f"slots: free {self._free}, taken {taken}"
