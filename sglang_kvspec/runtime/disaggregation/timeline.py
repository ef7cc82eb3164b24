"""Times at which each token of a request was first computed, for TTKT (Lynx section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Most timed tokens of a request. TTKT needs the first ones, and SGLang sends the list with every
# chunk.
MAX_TIMED_TOKENS = 256
# Name of the summaries in SGLang's results.
TRANSFER_CARRIER = "kvspec_transfer"


@dataclass(slots=True)
class Timeline:
    """Token times of a request, in seconds since its prefill ended, on the prefill server's clock.

    token_s: times of the first output tokens, at most MAX_TIMED_TOKENS. A token's time is that of
    its draft if the target kept that draft, else that of its verification. The prefill computed the
    first token. summaries: one entry a token, as SGLang sends them; the second entry, or a later
    one, is the summary of the KV transfer.
    """

    prefill_ended_at: float
    token_s: list[float] = field(default_factory=lambda: [0.0])
    summaries: list[dict[str, Any] | None] = field(default_factory=lambda: [None])
    _drafts_s: list[float] = field(default_factory=list)

    @property
    def is_told(self) -> bool:
        return len(self.summaries) > 1

    def note_draft(self, at: float) -> None:
        """Record a draft. at: seconds since the epoch."""
        self._drafts_s.append(at - self.prefill_ended_at)

    def note_verification(self, at: float, num_emitted: int) -> None:
        """Record a verification, which kept the first num_emitted - 1 drafts and added one token.
        at: seconds since the epoch."""
        times = [*self._drafts_s[: num_emitted - 1], at - self.prefill_ended_at]
        self.token_s += times[: MAX_TIMED_TOKENS - len(self.token_s)]
        self._drafts_s.clear()

    def tell(self, at: float, num_emitted: int, transfer: Mapping[str, Any]) -> None:
        """Add the summary of the KV transfer at the first verification, before note_verification().
        transfer: Landing.summary(), whose "seconds" are also since the prefill ended."""
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
