"""Emulated link: limits how fast bytes leave."""

from __future__ import annotations

from sglang_kvspec.core.errors import TransportError


class TokenBucket:
    """Limit of bytes_per_s on average, and at most burst_bytes more than that at once.

    A frame may leave whenever the level is above zero, and may take the level below zero. The
    bytes sent never exceed rate x time + burst + one frame. An anchor never waits to save up tokens
    for its whole length.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: int, now_s: float) -> None:
        if not bytes_per_s > 0 or burst_bytes < 1:
            raise TransportError(
                f"a link needs a rate > 0 and a burst >= 1, got {bytes_per_s} B/s, {burst_bytes} B"
            )
        self.bytes_per_s = bytes_per_s
        self.burst_bytes = burst_bytes
        self._level = float(burst_bytes)
        self._at_s = now_s

    def delay_s(self, now_s: float) -> float:
        """Return the seconds until a frame may leave; 0 if it may now."""
        self._refill(now_s)
        return 0.0 if self._level > 0 else (1 - self._level) / self.bytes_per_s

    def spend(self, num_bytes: int, now_s: float) -> None:
        """Record that num_bytes have left."""
        self._refill(now_s)
        self._level -= num_bytes

    def _refill(self, now_s: float) -> None:
        gained = max(0.0, now_s - self._at_s) * self.bytes_per_s
        self._level = min(self._level + gained, self.burst_bytes)
        self._at_s = max(self._at_s, now_s)
