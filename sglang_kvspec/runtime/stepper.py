"""Feeds the pure planner with what requests and pools look like, and applies page movements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_kvspec.core.config import AUTO_DRAFT_LEN, KVSpecConfig
from sglang_kvspec.planning.draft_length import DraftCost, best_draft_len
from sglang_kvspec.planning.step import CacheView, RequestView, StepPlan, StepPlanner
from sglang_kvspec.pools.residual_table import ResidualState
from sglang_kvspec.pools.tiered_kv import TieredKV
from sglang_kvspec.runtime.request_state import RequestState

# Residual bytes one iteration may bring into the cache: 55 GB/s of PCIe during a 10 ms iteration.
FETCH_BYTES_PER_ITERATION = 512 * 2**20


class Stepper:
    """Decides iteration by iteration, and moves the pages it has decided to move."""

    def __init__(self, config: KVSpecConfig, kv: TieredKV) -> None:
        self._config = config
        self._kv = kv
        link_pages = max(1, FETCH_BYTES_PER_ITERATION // kv.plan.page_bytes.residual)
        self._planner = StepPlanner(config.max_draft_len, link_pages)
        page = kv.plan.page_bytes
        self._cost = DraftCost(draft=page.anchor / page.plain)

    def plan(self, states: Sequence[RequestState], pages: Sequence[torch.Tensor]) -> StepPlan:
        """Plan one iteration of these requests and move the residual pages it names.

        pages: page ids of each request's verified tokens.
        """
        residuals = self._kv.residuals
        residuals.finish_fetches()
        views = [self._view(s, p) for s, p in zip(states, pages, strict=True)]
        plan = self._planner.plan(views, self._cache(views))
        if plan.evict:
            residuals.evict(plan.evict)
        if plan.fetch:
            residuals.start_fetch(plan.fetch)
        return plan

    @property
    def _cache_is_partial(self) -> bool:
        """Whether pages move between store and cache at all: a cache of no pages always streams."""
        plan = self._kv.plan
        return plan.host_pages > 0 and plan.cache_pages > 0

    def _view(self, state: RequestState, pages: torch.Tensor) -> RequestView:
        cap_len = state.cap_len(self._config.max_draft_len)
        best_len = cap_len
        if self._config.draft_len == AUTO_DRAFT_LEN and cap_len:
            best_len = best_draft_len(state.acceptance.probability, cap_len, self._cost)
        missing: list[int] = []
        resident: list[int] = []
        arriving: list[int] = []
        if self._cache_is_partial:
            table, ids = self._kv.residuals.table, pages.tolist()
            missing = table.pages_in(ids, ResidualState.STORED)
            resident = table.pages_in(ids, ResidualState.RESIDENT)
            arriving = table.pages_in(ids, ResidualState.FETCHING)
        return RequestView(
            key=state.rid,
            num_drafts=len(state.drafts),
            best_len=best_len,
            cap_len=cap_len,
            missing=tuple(missing),
            resident=tuple(resident),
            arriving=tuple(arriving),
            priority=state.priority,
        )

    def _cache(self, views: Sequence[RequestView]) -> CacheView:
        slots = self._kv.residuals.cache_slots
        cached: tuple[int, ...] = ()
        if self._cache_is_partial and any(view.missing for view in views):
            cached = tuple(self._kv.residuals.table.pages_in(slots, ResidualState.RESIDENT))
        return CacheView(slots.num_slots, slots.num_free, cached)
