"""Draft views that read a share of the pages: --kvspec-draft-budget."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.draft_view import ViewShape
from sglang_kvspec.runtime.request_state import RequestState

# Read at any budget: the first page, which draws much attention with any text, and the newest two
# pages.
SINK_PAGES = 1
NEWEST_PAGES = 2


class RecentPages:
    """View of the first page and the newest pages."""

    per_head: ClassVar[bool] = False
    num_queries: ClassVar[int] = 0

    def __init__(self, config: KVSpecConfig, shape: ViewShape) -> None:
        self._budget = config.draft_budget

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
    mattered last.
    """

    per_head: ClassVar[bool] = True
    num_queries: ClassVar[int] = 8

    def __init__(self, config: KVSpecConfig, shape: ViewShape) -> None:
        self._budget = config.draft_budget

    def select(self, state: RequestState, num_pages: int) -> torch.Tensor | None:
        """Select the best pages, and all pages that have no mass yet; all pages of a request that
        has not been scored."""
        mass = state.page_mass
        if mass is None:
            return None
        best = num_best(num_pages, self._budget)
        first_newest = min(mass.shape[-1], num_pages - NEWEST_PAGES)
        num_newest = num_pages - first_newest
        if SINK_PAGES + best + num_newest >= num_pages:
            return None
        candidates = mass[..., SINK_PAGES:first_newest]
        chosen = candidates.topk(best, sorted=False).indices.sort().values + SINK_PAGES
        lists = mass.shape[:-1]
        sinks = torch.arange(SINK_PAGES).expand(*lists, -1)
        newest = torch.arange(first_newest, num_pages).expand(*lists, -1)
        return torch.cat((sinks, chosen, newest), dim=-1)


def num_best(num_pages: int, budget: float) -> int:
    """Return how many of num_pages pages a budget pays for, at least one."""
    return max(1, math.ceil(num_pages * budget))
