"""Feeds the pure planner with what requests and pools look like, and applies page movements."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch

from sglang_kvspec.core.config import AUTO_DRAFT_LEN, KVSpecConfig
from sglang_kvspec.planning.draft_length import DraftCost, best_draft_len
from sglang_kvspec.planning.step import CacheView, RequestView, StepPlan, StepPlanner
from sglang_kvspec.pools.residual_table import ResidualState
from sglang_kvspec.pools.tiered_kv import TieredKV
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.speeds import Speeds

# What the planner is told the link moves stays while estimates differ by a smaller share: with
# every change places may be lost.
LINK_HYSTERESIS = 1 / 8
# Where streams are paced, a streamed request takes at most so many iterations to draft and verify
# for each token that it emitted last, so that those fill the time evenly.
ITERATIONS_A_TOKEN = 1.3
# Such a request verifies no more drafts at once: all other streams wait for the verification.
MOST_STREAMED_DRAFTS = 6


class Stepper:
    """Decides iteration by iteration, and moves the pages it has decided to move."""

    def __init__(self, config: KVSpecConfig, kv: TieredKV, ranks: Ranks | None = None) -> None:
        """ranks: which serve together, and plan with what the first has measured."""
        self._config = config
        self._kv = kv
        self._ranks = ranks or Ranks()
        self.speeds = Speeds(kv.residuals)
        self._link_pages = self._measured_link_pages()
        self._planner = StepPlanner(config.max_draft_len, self._link_pages)
        page = kv.plan.page_bytes
        self._cost = DraftCost(draft=page.anchor / page.plain)

    def plan(self, states: Sequence[RequestState], pages: Sequence[torch.Tensor]) -> StepPlan:
        """Plan one iteration of these requests and move the residual pages it names.

        pages: page ids of each request's verified tokens.
        """
        residuals = self._kv.residuals
        residuals.finish_fetches()
        if self._cache_is_partial:
            self._follow_link(states)
        views = [self._view(s, p) for s, p in zip(states, pages, strict=True)]
        plan = self._planner.plan(views, self._cache(views))
        if plan.evict:
            residuals.evict(plan.evict)
        if plan.fetch:
            residuals.start_fetch(plan.fetch)
        return plan

    def _follow_link(self, states: Sequence[RequestState]) -> None:
        """Plan with what the link was seen to move lately."""
        self.speeds.note_fetches()
        pages = self._measured_link_pages()
        if abs(pages - self._link_pages) <= LINK_HYSTERESIS * self._link_pages:
            pages = self._link_pages
        about = [(state.rid, state.committed_len) for state in states]
        (self._link_pages,) = self._ranks.numbers([pages], about)
        self._planner.set_link(self._link_pages)

    def _measured_link_pages(self) -> int:
        moved = self.speeds.link_bytes_per_s * self.speeds.iteration_s
        return max(1, int(moved / self._kv.plan.page_bytes.residual))

    @property
    def _cache_is_partial(self) -> bool:
        """Whether pages move between store and cache at all: a cache of no pages always streams."""
        plan = self._kv.plan
        return plan.host_pages > 0 and plan.cache_pages > 0

    def cycle_s(self, state: RequestState) -> float:
        """Return the seconds that a request, whose drafts were just verified, is expected to draft
        and verify again."""
        best_len, _ = self._lengths_of(state)
        return (best_len + 1) * self.speeds.iteration_s

    def _lengths_of(self, state: RequestState) -> tuple[int, int]:
        """Best and largest number of drafts before the next verification."""
        cap_len = state.cap_len(self._config.max_draft_len)
        best_len = cap_len
        if self._config.draft_len == AUTO_DRAFT_LEN and cap_len:
            best_len = best_draft_len(state.acceptance.probability, cap_len, self._cost)
            if state.is_streamed and self._config.stream == "paced":
                filling = ceil(ITERATIONS_A_TOKEN * state.last_emitted) - 1
                best_len = min(best_len, filling, MOST_STREAMED_DRAFTS)
        return best_len, cap_len

    def _view(self, state: RequestState, pages: torch.Tensor) -> RequestView:
        best_len, cap_len = self._lengths_of(state)
        missing: list[int] = []
        resident: list[int] = []
        arriving: list[int] = []
        if self._cache_is_partial:
            table, ids = self._kv.residuals.table, pages.tolist()
            missing = table.pages_in(ids, ResidualState.STORED)
            resident = table.pages_in(ids, ResidualState.RESIDENT)
            arriving = table.pages_in(ids, ResidualState.FETCHING)
        is_lacking = self._awaits_residuals(pages)
        state.has_waited |= is_lacking
        if state.has_waited and not is_lacking:
            # More drafts would only keep the user waiting (Lynx section 4.2).
            best_len = min(best_len, max(1, len(state.drafts)))
            if state.tail:
                # Nor has one read anything yet where none was made.
                best_len = cap_len = len(state.drafts)
        return RequestView(
            key=state.rid,
            num_drafts=len(state.drafts),
            best_len=best_len,
            cap_len=cap_len,
            missing=tuple(missing),
            resident=tuple(resident),
            arriving=tuple(arriving),
            priority=state.priority,
            is_lacking=is_lacking,
        )

    def _awaits_residuals(self, pages: torch.Tensor) -> bool:
        """Whether another server has yet to send some of them."""
        table = self._kv.residuals.table
        if not table.num_in(ResidualState.IN_FLIGHT):
            return False
        return bool(table.pages_in(pages.tolist(), ResidualState.IN_FLIGHT))

    def _cache(self, views: Sequence[RequestView]) -> CacheView:
        slots = self._kv.residuals.cache_slots
        cached: tuple[int, ...] = ()
        if self._cache_is_partial and any(view.missing for view in views):
            cached = tuple(self._kv.residuals.table.pages_in(slots, ResidualState.RESIDENT))
        return CacheView(slots.num_slots, slots.num_free, cached)
