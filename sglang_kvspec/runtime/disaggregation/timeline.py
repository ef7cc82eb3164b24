"""When each token of a request was first computed: TTKT (Lynx section 6) needs to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Of a request: how fast it begins is what counts, and SGLang sends the list with every chunk.
MAX_TIMED_TOKENS = 256
# What the summaries travel as in SGLang's results.
TRANSFER_CARRIER = "kvspec_transfer"


@dataclass(slots=True)
class Timeline:
    """Times in seconds since the request's prefill ended, on the other server's clock.

    token_s: of the first output tokens, MAX_TIMED_TOKENS at most: when each was drafted, if that
    draft was kept, or verified. The very first was computed by the prefill. summaries: an entry a
    token, of which the second, or a later one, is what is known of the KV transfer.
    """

    prefill_ended_at: float
    token_s: list[float] = field(default_factory=lambda: [0.0])
    summaries: list[dict[str, Any] | None] = field(default_factory=lambda: [None])
    _drafts_s: list[float] = field(default_factory=list)

    @property
    def is_told(self) -> bool:
        return len(self.summaries) > 1

    def note_draft(self, at: float) -> None:
        """at: seconds since the epoch."""
        self._drafts_s.append(at - self.prefill_ended_at)

    def note_verification(self, at: float, num_emitted: int) -> None:
        """All drafts but the first num_emitted - 1 were thrown away, and one token added."""
        times = [*self._drafts_s[: num_emitted - 1], at - self.prefill_ended_at]
        self.token_s += times[: MAX_TIMED_TOKENS - len(self.token_s)]
        self._drafts_s.clear()

    def tell(self, at: float, num_emitted: int, transfer: Mapping[str, Any]) -> None:
        """The first verification, before it is noted. transfer: what is known of the request's KV
        transfer; its "seconds" are since the prefill ended, too."""
        self.summaries.append(
            {
                **transfer,
                "prefill_ended_at": self.prefill_ended_at,
                "seconds": {
                    **transfer["seconds"],
                    "first_verification": at - self.prefill_ended_at,
                },
                "drafts_s": list(self._drafts_s),
                "accepted_first": num_emitted - 1,
            }
        )
