"""Which sequences of a session have been read."""

from __future__ import annotations

from sglang_kvspec.transport.frames import ACK_SPAN

_SPAN_MASK = (1 << ACK_SPAN) - 1


class ReplayWindow:
    """Remembers the last ACK_SPAN sequences up to the highest; anything older counts as seen."""

    def __init__(self) -> None:
        self.highest = 0
        self._seen = 0

    def admit(self, sequence: int) -> bool:
        """Whether `sequence` (from 1 on) is new; from now on it is not."""
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
        """Bit i, little endian: sequence highest - i has been seen. For an Ack."""
        return self._seen.to_bytes((self._seen.bit_length() + 7) // 8, "little")
