"""Counters of requests that wait for pages, are retracted or fail for want of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# Reasons for which a running server retracts requests.
OPERATING_REASONS = ("memory", "priority")
# SGLANG_TEST_RETRACT forces "test", which /server_info reports and metrics leave out.
REASONS = (*OPERATING_REASONS, "test")


@dataclass(slots=True)
class Pressure:
    """Counters of page shortage. waiting: requests in SGLang's queue while the first one waits for
    pages. most_waiting: the most so far. held_back: times that a request was not started for want
    of pages. retracted: requests by reason, of REASONS. out_of_memory: requests that failed because
    they did not fit even alone."""

    waiting: int = 0
    most_waiting: int = 0
    held_back: int = 0
    retracted: Counter[str] = field(default_factory=Counter)
    out_of_memory: int = 0
    _lacks_pages: bool = False

    def note_decision(self, *, lacks_pages: bool) -> None:
        """Record whether the first waiting request was held back for want of pages, or started."""
        self._lacks_pages = lacks_pages
        self.held_back += lacks_pages

    def note_queue(self, num_waiting: int) -> None:
        """Record how many requests wait, for any reason."""
        self.waiting = num_waiting if self._lacks_pages else 0
        self.most_waiting = max(self.most_waiting, self.waiting)

    def note_retraction(self, reason: str, num_requests: int, num_failed: int = 0) -> None:
        self.retracted[reason] += num_requests
        self.out_of_memory += num_failed

    def report(self) -> dict[str, Any]:
        """Return the counters, for /server_info."""
        return {
            "waiting_for_pages": self.waiting,
            "most_waiting_for_pages": self.most_waiting,
            "held_back": self.held_back,
            "retracted": {reason: self.retracted[reason] for reason in REASONS},
            "out_of_memory": self.out_of_memory,
        }
