"""Planner of the requests that verify at the end of a round, and of the page copies for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.planning.link_rounds import Turns
from sglang_kvspec.planning.round_plan import CacheView, RoundBudget, RoundPlan, RoundView
from sglang_kvspec.planning.round_step import RoundPlanner
from sglang_kvspec.planning.rounds import RoundCost
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.speeds import Speeds

IN_CACHE = (ResidualState.RESIDENT, ResidualState.FETCHING)


class ResidualPlanner:
    """Planner of verifications, which also starts the page copies that they need."""

    def __init__(self, kv: PagedKVCache) -> None:
        self._kv = kv
        self._planner = RoundPlanner()
        self.speeds = Speeds(kv.residuals)

    def plan(
        self,
        states: Sequence[RequestState],
        pages: Sequence[torch.Tensor],
        lens: Sequence[int],
        budget: RoundBudget,
        held: Collection[int] = (),
        *,
        drafts: bool,
        starts_ahead: bool = True,
    ) -> RoundPlan:
        """Plan a round in which request i adds lens[i] drafts, and start to move pages for it.

        pages: page ids of each request from position 0 on, at least of its verified tokens. held:
        requests that do not verify in this round whatever is in the cache, those of find_late()
        included. drafts: True if any request drafts before the round's verifications or, if there
        are none, in their place. starts_ahead: also call fetch_ahead(); otherwise the caller does.
        """
        residuals = self._kv.residuals
        residuals.finish_fetches()
        spills = [self._spill(state, n) for state, n in zip(states, lens, strict=True)]
        if self._nothing_can_move(sum(spills)):
            ready = [i for i in range(len(states)) if i not in held]
            self._planner.all_verify(states[i].rid for i in ready)
            return RoundPlan(tuple(ready))
        views = [
            self._view(*parts, is_pending=i in held)
            for i, parts in enumerate(zip(states, pages, spills, strict=True))
        ]
        slots = residuals.cache_slots
        _, cached = residuals.table.split(slots, ResidualState.STORED, IN_CACHE)
        # The other slots belong to arriving pages, whose residuals have no other place.
        num_slots = len(cached) + slots.num_free
        cache = CacheView(num_slots, slots.num_free, cached)
        plan = self._planner.plan(views, cache, budget, drafts=drafts)
        residuals.evict(plan.evict)
        residuals.start_fetch(plan.fetch)
        if starts_ahead:
            self.fetch_ahead(plan)
        return plan

    def fetch_ahead(self, plan: RoundPlan) -> None:
        """Prefetch the pages of a plan for later rounds, as far as they are still in the store and
        slots are free. The fetch is separate, so that the plan's verifications do not wait for
        it."""
        residuals = self._kv.residuals
        residuals.start_fetch(residuals.missing(plan.ahead)[: residuals.cache_slots.num_free])

    def plan_ahead(
        self,
        states: Sequence[RequestState],
        pages: Sequence[torch.Tensor],
        lens: Sequence[int],
        budget: RoundBudget,
        held: Collection[int] = (),
        *,
        drafts: bool,
    ) -> RoundPlan:
        """Plan a round before the server has said which requests stay for it. drafts: as in plan(),
        also for drafts that the states have by now.

        Requests that have all their tokens are about to leave, and are not planned for. If other
        forwards come first, call cancel(). If none has come, call fetch_ahead(): it is not called
        here, because a prefill would wait for its copies.
        """
        going = [i for i, state in enumerate(states) if state.remaining > 0]
        plan = self.plan(
            [states[i] for i in going],
            [pages[i] for i in going],
            [lens[i] for i in going],
            budget,
            [place for place, i in enumerate(going) if i in held],
            drafts=drafts,
            starts_ahead=False,
        )
        return replace(plan, verify=tuple(going[i] for i in plan.verify))

    def cancel(self) -> None:
        """Cancel the last plan. Pages that it has fetched stay in the cache until their slots are
        needed."""
        self._planner.cancel()

    def find_late(
        self, states: Sequence[RequestState], pages: Sequence[torch.Tensor]
    ) -> frozenset[int]:
        """Return the requests that cannot verify, because another server has yet to send some of
        their residuals, and mark each as having waited. pages: as in plan()."""
        table = self._kv.residuals.table
        if not table.num_in(ResidualState.IN_FLIGHT):
            return frozenset()
        late = frozenset(
            i
            for i, (state, ids) in enumerate(zip(states, pages, strict=True))
            if table.pages_in(self._full_pages(state, ids), ResidualState.IN_FLIGHT)
        )
        for i in late:
            states[i].has_waited = True
        return late

    def turns(self) -> Turns | None:
        """Return what verifications need of the link, at its measured speed; None where all
        residuals are in the cache."""
        self.speeds.note_fetches()
        return self._planner.turns(self._pages_per_s)

    def room(self) -> tuple[float, float] | None:
        """Return (requests whose residuals the cache holds at once, seconds that the link needs for
        those of one request), at its measured speed; None where all residuals are in the cache."""
        return self._planner.room(self._pages_per_s)

    def budget(self, lens: Sequence[int], cost: RoundCost) -> RoundBudget:
        """Return the pages that the link moves in a round that adds `lens` drafts, at its measured
        speed. Ranks measure different times: the caller broadcasts rank 0's budget."""
        drafting_s = cost.step * max(lens, default=0) + cost.row * sum(lens)
        return RoundBudget(self.pages_in(drafting_s), self.pages_in(cost.seconds(lens)))

    def pages_in(self, seconds: float) -> int:
        """Return the residual pages that the link moves in this time, at its measured speed."""
        self.speeds.note_fetches()
        return int(seconds * self._pages_per_s)

    @property
    def _pages_per_s(self) -> float:
        return self.speeds.link_bytes_per_s / self._kv.plan.page_bytes.stored

    def await_fetches(self, plan: RoundPlan, pages: Sequence[torch.Tensor]) -> None:
        """Let all work that is enqueued from now on wait for the fetches of requests that verify.
        pages: as in plan()."""
        self._kv.residuals.await_fetches(page for i in plan.verify for page in pages[i].tolist())

    def _nothing_can_move(self, spill: int) -> bool:
        """Return True if every residual is in the cache or on its way there, and the cache has room
        for `spill` pages. Ranks may differ in which residuals are still on their way, and must plan
        alike. Without a host store or a cache, nothing moves either."""
        plan = self._kv.plan
        if not plan.host_pages or not plan.cache_pages:
            return True
        num_away = self._kv.residuals.table.counts()["STORED"]
        return num_away == 0 and spill <= self._kv.residuals.cache_slots.num_free

    def _spill(self, state: RequestState, num_new: int) -> int:
        """Return the number of pages that a verification of num_new more drafts may fill."""
        size = self._kv.geometry.page_size
        end = state.next_position + num_new + 1
        return end // size - state.committed_len // size

    def _view(
        self, state: RequestState, pages: torch.Tensor, spill: int, *, is_pending: bool
    ) -> RoundView:
        table = self._kv.residuals.table
        ids = self._full_pages(state, pages)
        missing, cached = table.split(ids, ResidualState.STORED, IN_CACHE)
        return RoundView(
            key=state.rid,
            missing=missing,
            cached=cached,
            spill=spill,
            priority=state.priority,
            is_pending=is_pending,
        )

    def _full_pages(self, state: RequestState, pages: torch.Tensor) -> list[int]:
        """Return the request's pages that hold verified tokens only."""
        return pages[: state.committed_len // self._kv.geometry.page_size].tolist()
