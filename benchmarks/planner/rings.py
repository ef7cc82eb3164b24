"""Amounts reserved in coming iterations: link and HBM (VeriCache section 5.1), and verifications.

Amounts are integers, so that a ring is exactly zero after all reservations are released.
"""

from __future__ import annotations

from collections.abc import Iterable


class ReservationRing:
    """Reserved amounts of the next `horizon` iterations. Offset 0 is the current iteration."""

    def __init__(self, horizon: int, capacity: int) -> None:
        self.capacity = capacity
        self._reserved = [0] * horizon
        self._start = 0

    @property
    def horizon(self) -> int:
        return len(self._reserved)

    def reserved(self, offset: int) -> int:
        return self._reserved[self._index(offset)]

    def free(self, offset: int) -> int:
        """Return the free amount, which is negative if reservations are left from a larger
        capacity."""
        return self.capacity - self._reserved[self._index(offset)]

    def add(self, offset: int, amount: int) -> None:
        self._reserved[self._index(offset)] += amount

    def remove(self, offset: int, amount: int) -> None:
        index = self._index(offset)
        reserved = self._reserved[index]
        assert reserved >= amount, f"cannot release {amount}: only {reserved} is reserved"
        self._reserved[index] -= amount

    def is_over(self) -> bool:
        return max(self._reserved) > self.capacity

    def slide(self) -> None:
        """Drop the current iteration, and append an empty one at the far end."""
        self._reserved[self._start] = 0
        self._start = (self._start + 1) % len(self._reserved)

    def amounts(self) -> tuple[int, ...]:
        return tuple(self.reserved(offset) for offset in range(self.horizon))

    def _index(self, offset: int) -> int:
        assert 0 <= offset < len(self._reserved), f"offset {offset} is outside the ring"
        return (self._start + offset) % len(self._reserved)


class Rings:
    """Three rings in which a verification reserves: bytes moved over the link in an iteration,
    bytes of HBM held by fetched residuals, and verifications in one iteration."""

    def __init__(self, horizon: int, link_bytes: int, hbm_bytes: int, verifications: int) -> None:
        self.link = ReservationRing(horizon, link_bytes)
        self.hbm = ReservationRing(horizon, hbm_bytes)
        self.slots = ReservationRing(horizon, verifications)

    @property
    def horizon(self) -> int:
        return self.link.horizon

    def each(self) -> Iterable[ReservationRing]:
        return (self.link, self.hbm, self.slots)

    def is_over(self) -> bool:
        return any(ring.is_over() for ring in self.each())

    def slide(self) -> None:
        for ring in self.each():
            ring.slide()
