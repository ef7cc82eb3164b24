"""Feeds the pure planner with what requests and pools look like, and applies page movements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_kvspec.core.config import AUTO_DRAFT_LEN, KVSpecConfig
from sglang_kvspec.planning.draft_length import DraftCost, best_draft_len
from sglang_kvspec.planning.stagger import StaggerRing
from sglang_kvspec.planning.step import RequestView, StepBudget, StepPlan, plan_step
from sglang_kvspec.pools.residual_table import ResidualState
from sglang_kvspec.pools.tiered_kv import TieredKV
from sglang_kvspec.runtime.request_state import RequestState

# Residual bytes one iteration may bring into the cache: 55 GB/s of PCIe during a 10 ms iteration.
FETCH_BYTES_PER_ITERATION = 512 * 2**20


class Stepper:
    """Counts iterations and keeps verifications apart."""

    def __init__(self, config: KVSpecConfig, kv: TieredKV) -> None:
        self._config = config
        self._kv = kv
        self._ring = StaggerRing()
        self._now = 0
        self._num_running = 1
        self._fetch_pages = max(1, FETCH_BYTES_PER_ITERATION // kv.plan.page_bytes.residual)
        page = kv.plan.page_bytes
        self._cost = DraftCost(draft=page.anchor / page.plain)

    def start_cycle(self, state: RequestState, num_joining: int = 0) -> None:
        """Decide after how many drafts `state` should verify next."""
        cap_len = self._cap_len(state)
        if cap_len <= 0:
            state.due_len = 0
            return
        best = cap_len
        if self._config.draft_len == AUTO_DRAFT_LEN:
            best = best_draft_len(state.acceptance.probability, cap_len, self._cost)
        num_running = max(self._num_running, num_joining)
        state.due_len = self._ring.place(self._now, best, cap_len, num_running)

    def plan(self, states: Sequence[RequestState], pages: Sequence[torch.Tensor]) -> StepPlan:
        """Plan one iteration of these requests and move the residual pages it names.

        pages: page ids of each request's verified tokens.
        """
        self._now += 1
        self._num_running = len(states)
        residuals = self._kv.residuals
        residuals.finish_fetches()
        views = [self._view(i, s, p) for i, (s, p) in enumerate(zip(states, pages, strict=True))]
        plan = plan_step(views, self._budget(views))
        if plan.evict:
            residuals.evict(plan.evict)
        if plan.fetch:
            residuals.start_fetch(plan.fetch)
        return plan

    def _cap_len(self, state: RequestState) -> int:
        # The verification adds a token of its own to those drafted.
        return min(self._config.max_draft_len, state.remaining - 1)

    @property
    def _cache_is_partial(self) -> bool:
        """Whether pages move between store and cache at all: a cache of no pages always streams."""
        plan = self._kv.plan
        return plan.host_pages > 0 and plan.cache_pages > 0

    def _view(self, index: int, state: RequestState, pages: torch.Tensor) -> RequestView:
        missing: list[int] = []
        resident: list[int] = []
        num_arriving = 0
        if self._cache_is_partial:
            table, ids = self._kv.residuals.table, pages.tolist()
            missing = table.pages_in(ids, ResidualState.STORED)
            resident = table.pages_in(ids, ResidualState.RESIDENT)
            num_arriving = len(table.pages_in(ids, ResidualState.FETCHING))
        return RequestView(
            index=index,
            num_drafts=len(state.drafts),
            due_len=state.due_len,
            cap_len=max(0, self._cap_len(state)),
            waited=state.waited,
            missing=tuple(missing),
            resident=tuple(resident),
            num_arriving=num_arriving,
        )

    def _budget(self, views: Sequence[RequestView]) -> StepBudget:
        slots = self._kv.residuals.cache_slots
        idle: tuple[int, ...] = ()
        if self._cache_is_partial and any(view.missing for view in views):
            used = {page for view in views for page in view.resident}
            table = self._kv.residuals.table
            idle = tuple(
                table.pages_in((p for p in slots if p not in used), ResidualState.RESIDENT)
            )
        return StepBudget(
            fetch_pages=self._fetch_pages,
            free_cache_pages=slots.num_free,
            cache_pages=slots.num_slots,
            idle_resident=idle,
        )
