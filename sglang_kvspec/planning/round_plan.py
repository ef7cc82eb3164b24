"""Plain data that planning a round reads and returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheView:
    """Residual cache, in pages. cached: pages that the cache holds and may evict, used or not."""

    num_slots: int
    num_free: int
    cached: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundView:
    """Running request, as planning a round sees it.

    key: name of the request for as long as it runs. missing: encoded pages whose residual is in the
    store only. cached: pages whose residual is in the cache or on its way there. spill: further
    cache slots that its verification may need. is_pending: the request cannot verify, because other
    residuals are on the network or the schedule holds it. Its rounds of waiting do not count.
    """

    key: str
    missing: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    spill: int = 0
    priority: int = 0
    is_pending: bool = False

    @property
    def pages(self) -> tuple[int, ...]:
        return (*self.missing, *self.cached)

    @property
    def num_slots(self) -> int:
        return len(self.missing) + len(self.cached) + self.spill


@dataclass(frozen=True, slots=True)
class RoundBudget:
    """Pages that the link moves while the round drafts, and in the whole round."""

    drafting_pages: int
    round_pages: int


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Decisions about a round. verify: indices of requests, ascending. evict, fetch, ahead: pages
    to move before the round drafts, in this order. fetch: pages that its verifications read. ahead:
    pages to prefetch for later rounds."""

    verify: tuple[int, ...]
    fetch: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()
