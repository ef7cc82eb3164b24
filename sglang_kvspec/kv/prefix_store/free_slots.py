"""Free slots of a slab, handed out so that the pages of a prefix become neighbours."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence


class FreeSlots:
    """Free slots among 0..num_slots-1. Memory grows only with slots that were ever used."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        # Slots from here on were never used.
        self._fresh = 0
        self._returned: set[int] = set()
        # Heap of every returned slot, and of slots that were taken again.
        self._lowest: list[int] = []

    def __len__(self) -> int:
        return len(self._returned) + self._num_slots - self._fresh

    def __contains__(self, slot: int) -> bool:
        return slot in self._returned or self._fresh <= slot < self._num_slots

    def take(self, slot: int) -> None:
        assert slot in self, f"slot {slot} is not free"
        while self._fresh <= slot:
            self._fresh += 1
            self.give_back(self._fresh - 1)
        self._returned.remove(slot)

    def take_near(self, neighbour: int | None) -> int | None:
        """Take the slot after `neighbour` if it is free, else the lowest free slot. None if none is
        free."""
        slot: int | None = None
        if neighbour is not None and neighbour + 1 in self:
            slot = neighbour + 1
        elif self._returned:
            while self._lowest[0] not in self._returned:
                heapq.heappop(self._lowest)
            slot = self._lowest[0]
        elif self._fresh < self._num_slots:
            slot = self._fresh
        if slot is not None:
            self.take(slot)
        return slot

    def give_back(self, slot: int) -> None:
        assert slot not in self, f"slot {slot} was freed twice"
        self._returned.add(slot)
        heapq.heappush(self._lowest, slot)
        if len(self._lowest) > 64 + 2 * len(self._returned):
            self._lowest = sorted(self._returned)


def neighbour_runs(slots: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield groups of at most `most` positions in `slots`. The slots of a group follow one another
    upwards."""
    run: list[int] = []
    for position in sorted(range(len(slots)), key=slots.__getitem__):
        if run and (len(run) == most or slots[position] != slots[run[-1]] + 1):
            yield run
            run = []
        run.append(position)
    if run:
        yield run
