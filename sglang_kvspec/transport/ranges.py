"""Bytes of a chunk that have arrived."""

from __future__ import annotations

from bisect import bisect_left, insort


class ByteRanges:
    """Disjoint, sorted, half-open ranges within [0, size)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.covered = 0
        self._ranges: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def is_full(self) -> bool:
        return self.covered == self.size

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Cover [start, stop). Return the parts of it that are new, in order."""
        assert 0 <= start < stop <= self.size, (start, stop, self.size)
        first = bisect_left(self._ranges, start, key=lambda held: held[1])
        last = first
        low, high = start, stop
        fresh = []
        at = start
        while last < len(self._ranges) and self._ranges[last][0] <= stop:
            held_start, held_stop = self._ranges[last]
            if at < held_start:
                fresh.append((at, held_start))
            at = max(at, held_stop)
            low, high = min(low, held_start), max(high, held_stop)
            last += 1
        if at < stop:
            fresh.append((at, stop))
        del self._ranges[first:last]
        insort(self._ranges, (low, high))
        self.covered += sum(b - a for a, b in fresh)
        return fresh
