"""Bandwidth of the link between residual store and cache, estimated from its fetches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from sglang_kvspec.planning.online import OnlineValue

# Guess until the first fetch: whole pages between pinned memory and a GPU, over PCIe 5 x16.
GUESSED_BYTES_PER_S = 50e9
# A smaller fetch measures latency, not bandwidth. Small fetches are added up to this size.
LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Running estimate. rate: bytes a second. pending_bytes, pending_s: sums of fetches that are
    too small to measure the bandwidth alone."""

    rate: OnlineValue = field(default_factory=partial(OnlineValue, GUESSED_BYTES_PER_S))
    pending_bytes: int = 0
    pending_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.rate.value

    def observe(self, num_bytes: int, seconds: float) -> LinkEstimate:
        """Return the estimate after one more fetch. An empty fetch or an impossible time is
        ignored."""
        if num_bytes <= 0 or not 0 < seconds < float("inf"):
            return self
        num_bytes, seconds = self.pending_bytes + num_bytes, self.pending_s + seconds
        if num_bytes < LEAST_BYTES:
            return replace(self, pending_bytes=num_bytes, pending_s=seconds)
        return LinkEstimate(self.rate.observe(num_bytes / seconds))
