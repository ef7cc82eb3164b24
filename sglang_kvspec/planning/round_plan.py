"""What planning a round sees and decides: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheView:
    """The residual cache in pages. cached: all that it holds and may give up, used or not."""

    num_slots: int
    num_free: int
    cached: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundView:
    """What planning a round knows of a running request.

    key: names it for as long as it runs. missing: encoded pages whose residual is in the store
    only; cached: those in the cache or on their way into it. spill: cache slots that its
    verification may need besides. is_lacking: other residuals are still on the network, so that it
    cannot verify, and its turn has not begun.
    """

    key: str
    missing: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()
    spill: int = 0
    priority: int = 0
    is_lacking: bool = False

    @property
    def pages(self) -> tuple[int, ...]:
        return (*self.missing, *self.cached)

    @property
    def num_slots(self) -> int:
        return len(self.missing) + len(self.cached) + self.spill


@dataclass(frozen=True, slots=True)
class RoundBudget:
    """Pages that the link moves while the round drafts, and in all of it."""

    drafting_pages: int
    round_pages: int


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """verify: indices of requests, ascending. evict, then fetch: pages to move before the round
    drafts; first those that its verifications read, then `ahead`, for later ones."""

    verify: tuple[int, ...]
    fetch: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()
