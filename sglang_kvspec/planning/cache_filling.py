"""Filling of the residual cache by the verifications of a round."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_kvspec.planning.round_plan import RoundView


@dataclass(slots=True)
class CacheFilling:
    """Residual cache as this round's verifications fill it. budget: pages that can be fetched while
    the round drafts. pages: pages that the verifications read. fetch: pages to fetch, in order."""

    num_slots: int
    budget: int
    pages: set[int] = field(default_factory=set)
    fetch: dict[int, None] = field(default_factory=dict)
    spill: int = 0

    def holds(self, request: RoundView, reserved: int = 0) -> bool:
        together = len(self.pages.union(request.pages)) + self.spill + request.spill
        return together + reserved <= self.num_slots

    def can_bring(self, request: RoundView) -> bool:
        new = set(request.missing) - self.fetch.keys()
        return not new or len(self.fetch) + len(new) <= self.budget

    def add(self, request: RoundView) -> None:
        self.pages.update(request.pages)
        self.fetch |= dict.fromkeys(request.missing)
        self.spill += request.spill
