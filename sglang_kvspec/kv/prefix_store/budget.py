"""Limits of a prefix store: bytes on disk, bytes in its queue, bytes written a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_kvspec.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of a store. disk_bytes: for all its files together. residual_share: share of the pages
    that have room for their residual, from 0 to 1. write_bytes_per_s: None for no limit."""

    disk_bytes: int
    residual_share: float = 1.0
    queue_bytes: int = 256 << 20
    write_bytes_per_s: float | None = None
    write_burst_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.residual_share <= 1:
            raise ConfigError(f"residual_share must be from 0 to 1, got {self.residual_share}")
        if self.queue_bytes < 1 or self.write_burst_bytes < 1:
            raise ConfigError(
                "queue_bytes and write_burst_bytes must be at least 1, got "
                f"{self.queue_bytes} and {self.write_burst_bytes}"
            )
        if self.write_bytes_per_s is not None and not self.write_bytes_per_s > 0:
            raise ConfigError(f"write_bytes_per_s must be above 0, got {self.write_bytes_per_s}")

    def slots(self, anchor_bytes: int, residual_bytes: int, fixed_bytes: int) -> tuple[int, int]:
        """Return the numbers of anchor and of residual slots that fit. anchor_bytes and
        residual_bytes include the entry of a record. Raises ConfigError if no page fits."""
        page_bytes = anchor_bytes + residual_bytes * self.residual_share
        num_anchors = int((self.disk_bytes - fixed_bytes) / page_bytes)
        if num_anchors < 1:
            least = fixed_bytes + anchor_bytes + residual_bytes
            raise ConfigError(
                f"a prefix store needs at least {least} bytes for one page, got {self.disk_bytes}"
            )
        return num_anchors, int(num_anchors * self.residual_share)


class TokenBucket:
    """Limit of bytes a second, on average. After a pause, `burst_bytes` may be taken at once.

    A page larger than the burst may be taken when the bucket is not in debt, and leaves it in debt.
    """

    def __init__(
        self, bytes_per_s: float | None, burst_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._rate = bytes_per_s
        self._burst = float(burst_bytes)
        self._clock = clock
        self._level = self._burst
        self._filled_at = clock()

    def delay_s(self) -> float:
        """Return the seconds until bytes may be taken; 0 if they may be taken now."""
        if self._rate is None:
            return 0.0
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return max(0.0, -self._level / self._rate)

    def take(self, num_bytes: int) -> None:
        if self._rate is not None:
            self._level -= num_bytes
