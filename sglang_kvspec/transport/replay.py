"""Sequences of a session that have been read."""

from __future__ import annotations

from sglang_kvspec.transport.frames import ACK_SPAN

_SPAN_MASK = (1 << ACK_SPAN) - 1


class ReplayWindow:
    """Memory of the last ACK_SPAN sequences up to the highest; older ones count as seen."""

    def __init__(self) -> None:
        self.highest = 0
        self._seen = 0

    def admit(self, sequence: int) -> bool:
        """Record that `sequence` (from 1 on) was read. Return True if it is new."""
        if sequence > self.highest:
            shift = min(sequence - self.highest, ACK_SPAN)
            self._seen = (self._seen << shift | 1) & _SPAN_MASK
            self.highest = sequence
            return True
        behind = self.highest - sequence
        if sequence < 1 or behind >= ACK_SPAN or self._seen >> behind & 1:
            return False
        self._seen |= 1 << behind
        return True

    def bitmap(self) -> bytes:
        """Return the bits of an Ack: bit i, little endian, is set if highest - i was read."""
        return self._seen.to_bytes((self._seen.bit_length() + 7) // 8, "little")
