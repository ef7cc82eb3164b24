"""Draft views that read a share of the pages: --kvspec-draft-budget."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from kvspec_kernels.reference.page_selection import select_pages
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.planning.draft_budget import ALL_PAGES, NEWEST_PAGES, SINK_PAGES
from sglang_kvspec.runtime.draft_view import PageCounts, ViewShape
from sglang_kvspec.runtime.request_state import RequestState

# Budget of RecentPages and of compressors if none is given.
DEFAULT_BUDGET = 0.1


class RecentPages:
    """View of the first page and the newest pages."""

    per_head: ClassVar[bool] = False
    num_queries: ClassVar[int] = 0

    def __init__(self, config: KVSpecConfig, shape: ViewShape) -> None:
        self._budget = fixed_budget(config)

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        """Select as many pages as ScoredPages does."""
        num_newest = NEWEST_PAGES + num_best(num_pages, self._budget)
        if SINK_PAGES + num_newest >= num_pages:
            return None
        newest = torch.arange(num_pages - num_newest, num_pages)
        return torch.cat((torch.arange(SINK_PAGES), newest))


class ScoredPages:
    """View of the pages with the largest attention mass, for each layer and KV head.

    The mass is that of the request's last verified queries. So a choice is as old as the newest
    verification. Whole pages stand that better than single tokens: what matters next lies near what
    mattered last. (AsyncSpade, section 3, chooses single tokens.)
    """

    per_head: ClassVar[bool] = True
    num_queries: ClassVar[int] = 4

    def __init__(self, config: KVSpecConfig, shape: ViewShape) -> None:
        pass

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        """Select the pages that counts() asks for, by the state's page_mass."""
        counts = self.counts(state, num_pages)
        if counts is None:
            return None
        mass = state.page_mass
        assert mass is not None
        without = mass.new_zeros((*mass.shape[:-1], num_pages - mass.shape[-1]))
        known = torch.cat((mass, without), dim=-1)
        count, num_newest = counts.total(num_pages), num_pages - counts.newest
        return select_pages(known, count, SINK_PAGES, num_newest)

    def counts(self, state: RequestState, num_pages: int) -> PageCounts | None:
        """Return counts by the state's budget; None for a request that has not been scored, and
        where all pages are no more."""
        if not state.num_scored or state.budget == ALL_PAGES:
            return None
        best = num_best(num_pages, state.budget)
        newest = min(state.num_scored, num_pages - NEWEST_PAGES)
        return None if SINK_PAGES + best >= newest else PageCounts(best, newest)


def fixed_budget(config: KVSpecConfig) -> float:
    """Return the share of pages that drafts read where it is the same for all requests."""
    return DEFAULT_BUDGET if config.asked_budget is None else config.asked_budget


def num_best(num_pages: int, budget: float) -> int:
    """Return how many of num_pages pages a budget pays for, at least one."""
    return max(1, math.ceil(num_pages * budget))
