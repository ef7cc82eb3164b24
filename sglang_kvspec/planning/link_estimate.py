"""What the link between residual store and cache moves a second, learnt from its fetches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from sglang_kvspec.planning.online import OnlineValue

# Until a fetch was seen: whole pages over PCIe 5 x16 to pinned memory.
GUESSED_BYTES_PER_S = 50e9
# Less measures latency, not bandwidth: small fetches count together.
LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """rate: bytes a second. pending_bytes, pending_s: of fetches too small to tell by themselves.
    Observing returns a new estimate."""

    rate: OnlineValue = field(default_factory=partial(OnlineValue, GUESSED_BYTES_PER_S))
    pending_bytes: int = 0
    pending_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.rate.value

    def observe(self, num_bytes: int, seconds: float) -> LinkEstimate:
        """Learn from one fetch. Impossible times teach nothing."""
        if num_bytes <= 0 or not 0 < seconds < float("inf"):
            return self
        num_bytes, seconds = self.pending_bytes + num_bytes, self.pending_s + seconds
        if num_bytes < LEAST_BYTES:
            return replace(self, pending_bytes=num_bytes, pending_s=seconds)
        return LinkEstimate(self.rate.observe(num_bytes / seconds))
