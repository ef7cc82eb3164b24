"""One iteration, decided: who drafts, who verifies, who waits, which residual pages move.

The planner of verifications (reservations.py) works in amounts of bytes, which are pages here, and
knows no pages. This module gives it what running requests need, and turns its places into pages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil, inf

from sglang_kvspec.planning.admission import Ask, Outcome
from sglang_kvspec.planning.reservations import IterationBudget, VerificationPlanner
from sglang_kvspec.planning.residency import ResidencyView, choose_resident, num_resident

# A fetch that is later than this is given up: its request verifies and reads the store.
MAX_LATE_ITERATIONS = 8
# Verifications allowed in an iteration, over an even spread.
SLACK = 1.25


@dataclass(frozen=True, slots=True)
class RequestView:
    """What planning knows of a running request.

    key: names it for as long as it runs. best_len: drafts it would best verify; cap_len: most it
    can hold or use. missing: encoded pages whose residual is in the store only; resident: those in
    the cache; arriving: those on their way from one to the other. is_lacking: other residuals are
    still on the network, so that it cannot verify.
    """

    key: str
    num_drafts: int
    best_len: int
    cap_len: int
    missing: tuple[int, ...] = ()
    resident: tuple[int, ...] = ()
    arriving: tuple[int, ...] = ()
    priority: int = 0
    is_lacking: bool = False

    @property
    def pages(self) -> tuple[int, ...]:
        return (*self.missing, *self.resident, *self.arriving)


@dataclass(frozen=True, slots=True)
class CacheView:
    """The residual cache in pages. cached: all that it holds and may give up, used or not."""

    num_slots: int
    num_free: int
    cached: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Indices of requests by what they do, and pages to move before the forward."""

    draft: tuple[int, ...]
    verify: tuple[int, ...]
    wait: tuple[int, ...]
    fetch: tuple[int, ...]
    evict: tuple[int, ...]


@dataclass(slots=True)
class _Known:
    """request_id: in the planner. held: pages fetched for its next verification. streams: it has
    no place, since what it would fetch fits no cache: it verifies when due and reads the store.
    late: iterations that its fetch is late."""

    request_id: int
    held: frozenset[int] = frozenset()
    streams: bool = False
    late: int = 0

    def start_over(self) -> None:
        """It verifies: what it had asked for is over, and it asks again once it has verified."""
        self.held, self.streams, self.late = frozenset(), False, 0


@dataclass(slots=True)
class _Pages:
    """Pages of an iteration's requests. keep: of requests whose residuals stay in the cache."""

    used: set[int] = field(default_factory=set)
    keep: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)


class StepPlanner:
    """Holds what has been promised to every running request.

    A due request without its residuals is never held up for good: its place is bounded by the
    planner (`wait_bound`), and one that can have no place reads its residuals from the store.
    """

    def __init__(self, max_draft_len: int, link_pages: int) -> None:
        """link_pages: what the link moves in an iteration."""
        most = max(max_draft_len, 1)
        self._link_pages = link_pages
        self._planner = VerificationPlanner(
            IterationBudget(link_pages, 0, 1),
            max_draft_len=most,
            horizon=2 * most + 1,
        )
        self._known: dict[str, _Known] = {}
        self._ids = count()
        # Keys of requests whose residuals stay in a cache that does not hold everybody's.
        self._staying: frozenset[str] = frozenset()

    def plan(self, requests: Sequence[RequestView], cache: CacheView) -> StepPlan:
        """Decide one iteration. Every request gets exactly one of draft, verify, wait."""
        self._forget_all_but({request.key for request in requests})
        pages = self._sort_pages(requests, cache)
        self._resize(requests, cache, pages)
        by_id: dict[int, RequestView] = {}
        for request in requests:
            known = self._known.setdefault(request.key, _Known(next(self._ids)))
            by_id[known.request_id] = request
            if not request.is_lacking:
                self._ask(request, known, cache, pages)
        late = [r for r in self._planner.due if self._is_late(by_id[r])]
        decided = self._planner.advance(late)
        for decision in decided.decisions:
            if decision.outcome is Outcome.TOO_LARGE:
                # It fitted when it asked; what stays in the cache has grown since.
                self._known[by_id[decision.request_id].key].streams = True
        starting = [by_id[start.request_id] for start in decided.starts]
        fetch, evict = self._move(starting, requests, cache, pages)
        verify_ids = set(decided.verify)
        draft, verify, wait = [], [], []
        for index, request in enumerate(requests):
            known = self._known[request.key]
            if known.request_id in verify_ids or self._verifies_unplaced(request, known):
                self._planner.cancel(known.request_id)
                known.start_over()
                verify.append(index)
            elif request.num_drafts < request.cap_len:
                draft.append(index)
            else:
                wait.append(index)
        return StepPlan(tuple(draft), tuple(verify), tuple(wait), fetch, evict)

    def set_link(self, link_pages: int) -> None:
        """What the link moves in an iteration, from now on."""
        self._link_pages = link_pages

    def _forget_all_but(self, keys: Collection[str]) -> None:
        for key in [key for key in self._known if key not in keys]:
            self._planner.cancel(self._known.pop(key).request_id)

    def _sort_pages(self, requests: Sequence[RequestView], cache: CacheView) -> _Pages:
        """Whose residuals stay in the cache from one verification to the next."""
        pages = _Pages()
        for request in requests:
            pages.used.update(request.pages)
            if request.key in self._known:
                pages.held |= self._known[request.key].held
        if len(pages.used) <= cache.num_slots:
            pages.keep = pages.used
            return pages
        sizes = [len(r.pages) for r in requests if r.pages and self._fits(r, cache)]
        kept_slots = self._kept_slots(sizes, requests, cache)
        views = [
            ResidencyView(
                request_id=index,
                residual_bytes=len(request.pages),
                next_use=max(request.best_len - request.num_drafts, 0),
                cycle_len=request.best_len,
                is_resident=request.key in self._staying,
            )
            for index, request in enumerate(requests)
        ]
        chosen = choose_resident(views, kept_slots)
        self._staying = frozenset(requests[index].key for index in chosen)
        for index in chosen:
            pages.keep.update(requests[index].pages)
        return pages

    def _kept_slots(
        self, sizes: Sequence[int], requests: Sequence[RequestView], cache: CacheView
    ) -> int:
        """Slots of the cache for requests that keep their residuals; of what is left the largest
        request can be fetched. sizes: pages of those that may."""
        if not sizes:
            return 0
        each = ceil(sum(sizes) / len(sizes))
        cycle_len = sum(request.best_len for request in requests) / len(requests) + 1
        num = num_resident(len(sizes), each, cycle_len, cache.num_slots, self._link_pages)
        return max(min(num * each, cache.num_slots - max(sizes)), 0)

    def _resize(self, requests: Sequence[RequestView], cache: CacheView, pages: _Pages) -> None:
        """Give the planner the room that resident pages leave, and its share of verifications."""
        settled = (pages.keep & set(cache.cached)) - pages.held
        best = sum(request.best_len for request in requests) / max(len(requests), 1)
        budget = IterationBudget(
            link_bytes=self._link_pages,
            hbm_bytes=max(cache.num_slots - len(settled), 0),
            verifications=max(1, ceil(SLACK * len(requests) / (best + 1))),
        )
        dropped = set(self._planner.resize(budget))
        for known in self._known.values():
            if known.request_id in dropped:
                known.held = frozenset()

    @staticmethod
    def _fits(request: RequestView, cache: CacheView) -> bool:
        return len(request.pages) <= cache.num_slots

    def _ask(self, request: RequestView, known: _Known, cache: CacheView, pages: _Pages) -> None:
        """Ask for a place where a request drafts and has none yet."""
        if known.streams or request.cap_len <= 0 or self._planner.knows(known.request_id):
            return
        # What is cached now but does not stay may be gone by then.
        needed = len(set(request.pages) - (pages.keep & set(request.resident)))
        if not self._fits(request, cache) or needed > self._planner.rings.hbm.capacity:
            known.streams = True
            return
        best = max(1, min(request.best_len, request.cap_len))
        self._planner.submit(
            Ask(known.request_id, needed, best, request.num_drafts, request.priority)
        )

    def _is_late(self, request: RequestView) -> bool:
        known = self._known[request.key]
        if known.held.isdisjoint(request.arriving) or known.late >= MAX_LATE_ITERATIONS:
            return False
        known.late += 1
        return True

    def wait_bound(self, num_running: int) -> int:
        """Most iterations between two verifications of one of num_running requests: those until it
        has a place, those to its place, and those its fetch may be late. When the link turns out
        slower, places are lost and waiting for another begins anew, with the request's age."""
        horizon = self._planner.rings.horizon
        return self._planner.wait_bound(num_running) + horizon + MAX_LATE_ITERATIONS

    @staticmethod
    def _verifies_unplaced(request: RequestView, known: _Known) -> bool:
        if request.is_lacking:
            return False
        if request.cap_len <= 0:
            return True
        return known.streams and request.num_drafts >= min(request.best_len, request.cap_len)

    def _move(
        self,
        starting: Sequence[RequestView],
        requests: Sequence[RequestView],
        cache: CacheView,
        pages: _Pages,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Pages to fetch for requests whose span begins, and pages that make room for them: those
        used last come first, and before them those of no running request."""
        fetch: dict[int, None] = {}
        for request in starting:
            needed = dict.fromkeys((*request.missing, *request.arriving))
            self._known[request.key].held = frozenset(needed)
            pages.held.update(needed)
            fetch.update(dict.fromkeys(request.missing))
        if not fetch:
            return (), ()
        loose = [page for page in cache.cached if page not in pages.keep | pages.held]
        next_use: dict[int, float] = {}
        for request in requests:
            due = max(request.best_len - request.num_drafts, 0)
            for page in request.resident:
                next_use[page] = min(next_use.get(page, inf), due)
        victims = sorted(loose, key=lambda page: (-next_use.get(page, inf), page))
        evict = victims[: max(len(fetch) - cache.num_free, 0)]
        # What finds no room, because pages are shared or were born meanwhile, is read from the
        # store when its request verifies.
        return tuple(fetch)[: cache.num_free + len(evict)], tuple(evict)
