"""One iteration, decided: who drafts, who verifies, who waits, which residual pages move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

# A request whose residuals do not arrive verifies by streaming them after this many iterations.
MAX_WAIT_ITERATIONS = 8
# Residuals are fetched for verifications due within this many iterations.
FETCH_HORIZON = 16


@dataclass(frozen=True, slots=True)
class RequestView:
    """What planning knows of a running request.

    due_len: drafts after which it should verify; cap_len: most drafts it can hold or use;
    missing: encoded pages whose residual is in the store only; resident: those in the cache;
    num_arriving: those on their way from one to the other.
    """

    index: int
    num_drafts: int
    due_len: int
    cap_len: int
    waited: int = 0
    missing: tuple[int, ...] = ()
    resident: tuple[int, ...] = ()
    num_arriving: int = 0

    @property
    def num_encoded(self) -> int:
        return len(self.missing) + len(self.resident) + self.num_arriving

    @property
    def due_in(self) -> int:
        """Iterations until its verification is due."""
        return max(0, min(self.due_len, self.cap_len) - self.num_drafts)


@dataclass(frozen=True, slots=True)
class StepBudget:
    """fetch_pages: pages the link can move in one iteration; free_cache_pages and cache_pages: of
    the residual cache; idle_resident: cached pages no running request uses."""

    fetch_pages: int
    free_cache_pages: int
    cache_pages: int
    idle_resident: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Indices of requests by what they do, and pages to move before the forward."""

    draft: tuple[int, ...]
    verify: tuple[int, ...]
    wait: tuple[int, ...]
    fetch: tuple[int, ...]
    evict: tuple[int, ...]


def plan_step(requests: Sequence[RequestView], budget: StepBudget) -> StepPlan:
    """Decide one iteration. Every request gets exactly one of draft, verify, wait.

    A due request verifies when its residuals are resident, or when they never all could be (they
    are then streamed), or when it has waited its bound. Until then it drafts on to its cap. It
    waits only while pages of its own are on their way.
    """
    fetch, evict = _plan_fetches(requests, budget)
    draft, verify, wait = [], [], []
    for request in requests:
        if request.due_in > 0:
            draft.append(request.index)
        elif _may_verify(request, budget):
            verify.append(request.index)
        elif request.num_drafts < request.cap_len:
            draft.append(request.index)
        elif request.num_arriving or not set(fetch).isdisjoint(request.missing):
            wait.append(request.index)
        else:
            verify.append(request.index)
    return StepPlan(tuple(draft), tuple(verify), tuple(wait), fetch, evict)


def _may_verify(request: RequestView, budget: StepBudget) -> bool:
    if not request.missing and not request.num_arriving:
        return True
    too_large = request.num_encoded > budget.cache_pages
    return too_large or request.waited >= MAX_WAIT_ITERATIONS


def _plan_fetches(
    requests: Sequence[RequestView], budget: StepBudget
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Fetch for the soonest verifications first; make room by evicting the page used latest."""
    if not any(request.missing for request in requests):
        return (), ()
    next_use: dict[int, float] = dict.fromkeys(budget.idle_resident, inf)
    for request in requests:
        for page in request.resident:
            next_use[page] = min(next_use.get(page, inf), request.due_in)
    victims = sorted(next_use, key=lambda page: (-next_use[page], page))
    fetch: list[int] = []
    evict: list[int] = []
    free = budget.free_cache_pages
    for request in sorted(requests, key=lambda r: (r.due_in, r.index)):
        if request.due_in > FETCH_HORIZON:
            break
        if request.num_encoded > budget.cache_pages:
            continue
        for page in request.missing:
            if page in fetch:
                continue
            if len(fetch) == budget.fetch_pages:
                return tuple(fetch), tuple(evict)
            if free == 0:
                victim = next((p for p in victims if next_use[p] > request.due_in), None)
                if victim is None:
                    return tuple(fetch), tuple(evict)
                victims.remove(victim)
                evict.append(victim)
                free += 1
            fetch.append(page)
            free -= 1
    return tuple(fetch), tuple(evict)
