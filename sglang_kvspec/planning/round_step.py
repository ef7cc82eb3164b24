"""Plan of a round: requests that verify at its end, and residual pages that move while it drafts.

If the cache holds every residual, all requests verify and nothing moves. If not, some requests keep
their residuals in the cache and verify in every round. The others take turns with the rest of the
cache. Pages that the link cannot bring while a round drafts are prefetched for a later round, and
their request drafts on meanwhile.

A request that has not verified for PATIENCE rounds is overdue. The oldest overdue request verifies
in the next round, however long its fetch takes. So none of n requests waits more than PATIENCE + n
rounds (`wait_bound`), whatever budgets are and however pages come and go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from sglang_kvspec.planning.cache_filling import CacheFilling
from sglang_kvspec.planning.link_rounds import Turns
from sglang_kvspec.planning.residency import ResidencyView, choose_resident
from sglang_kvspec.planning.round_plan import CacheView, RoundBudget, RoundPlan, RoundView

PATIENCE = 8
# Weight of the newest round in running means.
WEIGHT = 0.1
# Least share of the cache that is kept for fetches, if the cache does not hold every residual.
FETCH_SHARE = 0.7
# If the link fills the shared part of the cache in fewer rounds, the link idles for lack of room.
ROUNDS_TO_FILL = 1.7


@dataclass(slots=True)
class _Learnt:
    """State of RoundPlanner between rounds.

    waited: rounds since every running request verified. staying: requests whose residuals stay in
    the cache. most: how many other requests the cache holds beside them, None where nothing has to
    move. fetched, turns: running means of the pages fetched and of the other requests verified in a
    round. pace: running mean of the pages that the link moves in a round. num_left: pages that
    verifications of cancelled plans had waited for.
    """

    waited: dict[str, int] = field(default_factory=dict)
    staying: frozenset[str] = frozenset()
    most: float | None = None
    fetched: float = 0.0
    turns: float = 0.0
    pace: float | None = None
    num_left: int = 0


class RoundPlanner:
    """Planner of rounds. Between rounds the planner remembers when every running request verified,
    which residuals stay in the cache, and what the last rounds needed of the link."""

    def __init__(self) -> None:
        self._learnt = _Learnt()
        # State that cancel() restores.
        self._before = replace(self._learnt)
        # Cache slots, and the mean number of slots that a request needs.
        self._slots = self._each = 0.0
        # Pages that the last plan's verifications wait for.
        self._num_awaited = 0

    @staticmethod
    def wait_bound(num_running: int) -> int:
        """Return the most rounds in a row in which one of num_running requests does not verify."""
        return PATIENCE + num_running

    def all_verify(self, keys: Iterable[str]) -> None:
        """Note a round that was not planned here, because nothing has to move."""
        learnt = self._begin()
        learnt.num_left = 0
        learnt.waited = dict.fromkeys(keys, 0)
        learnt.most = None

    def cancel(self) -> None:
        """Cancel the last plan: no request has verified in its round. The pages that its
        verifications would have waited for count for the next round, which finds them in the cache.
        The pages to prefetch do not count, since they have not been fetched."""
        num_left = self._before.num_left + self._num_awaited
        self._learnt = replace(self._before, num_left=num_left)
        self._num_awaited = 0

    def _begin(self) -> _Learnt:
        """Save the state for cancel(), and return the state of the round to plan."""
        self._before = replace(self._learnt)
        self._num_awaited = 0
        return self._learnt

    def turns(self, pages_per_s: float) -> Turns | None:
        """Return what rounds like the last ones need of a link of this speed; None where all
        residuals are in the cache."""
        learnt = self._learnt
        if learnt.most is None:
            return None
        pages = learnt.fetched / max(learnt.turns, 1e-6)
        return Turns(len(learnt.staying), learnt.most, max(pages / pages_per_s, 1e-9))

    def room(self, pages_per_s: float) -> tuple[float, float] | None:
        """Return (requests whose residuals the cache holds at once, at least 1; seconds that a link
        of this speed needs for one request). None where all residuals are in the cache."""
        if self._learnt.most is None or self._each < 1:
            return None
        return max(self._slots / self._each, 1.0), self._each / pages_per_s

    def plan(
        self,
        requests: Sequence[RoundView],
        cache: CacheView,
        budget: RoundBudget,
        *,
        drafts: bool,
    ) -> RoundPlan:
        """Plan a round. drafts: True if any request drafts in this round, which then has a use even
        if none verifies. cache.cached: all pages that may be evicted.

        A request larger than the whole cache verifies in every round, and reads the store.
        """
        learnt = self._begin()
        learnt.waited = {request.key: learnt.waited.get(request.key, 0) for request in requests}
        self._choose_staying(requests, cache.num_slots)
        self._slots = float(cache.num_slots)
        self._each = sum(request.num_slots for request in requests) / max(len(requests), 1)
        fills_soon = self._fills_soon(requests, cache.num_slots, budget.round_pages)
        filling = CacheFilling(cache.num_slots, budget.drafting_pages)
        verify: list[int] = []
        later: list[int] = []
        # Missing pages of waiting requests, for which slots are reserved if the cache fills soon.
        num_missing = 0
        for index in self._in_order(requests):
            request = requests[index]
            if request.is_pending:
                continue
            reserved = max(min(num_missing, budget.round_pages - len(filling.fetch)), 0)
            if request.num_slots > cache.num_slots:
                verify.append(index)
            elif filling.holds(request, reserved) and (
                filling.can_bring(request) or self._is_forced(request, verify, later)
            ):
                filling.add(request)
                verify.append(index)
            else:
                later.append(index)
                num_missing += len(request.missing) if fills_soon else 0
        if not verify and not drafts and later:
            # Without this verification, the round would do nothing.
            verify.append(later.pop(0))
            filling.add(requests[verify[0]])
        ahead = self._ahead([requests[i] for i in later], filling, budget.round_pages)
        evict = self._victims(requests, cache, filling, ahead)
        num_fetched = len(filling.fetch) + len(ahead) + learnt.num_left
        self._note_turns(requests, cache, verify, num_fetched)
        self._num_awaited, learnt.num_left = len(filling.fetch), 0
        self._count(requests, verify)
        return RoundPlan(tuple(sorted(verify)), tuple(filling.fetch), ahead, evict)

    def _note_turns(
        self,
        requests: Sequence[RoundView],
        cache: CacheView,
        verify: Collection[int],
        num_fetched: int,
    ) -> None:
        learnt = self._learnt
        staying = [request for request in requests if request.key in learnt.staying]
        others = [request for request in requests if request.key not in learnt.staying]
        if not others:
            learnt.most = None
            return
        each = sum(request.num_slots for request in others) / len(others)
        room = cache.num_slots - sum(request.num_slots for request in staying)
        num_turns = sum(requests[i].key not in learnt.staying for i in verify)
        if learnt.most is None:
            # Start the means as if one request had been fetched whole.
            learnt.fetched, learnt.turns = each, 1.0
        learnt.most = max(room // max(each, 1), 1.0)
        learnt.fetched += WEIGHT * (num_fetched - learnt.fetched)
        learnt.turns += WEIGHT * (num_turns - learnt.turns)

    def _fills_soon(self, requests: Sequence[RoundView], num_slots: int, round_pages: int) -> bool:
        """Return True if the link could fill the cache slots of requests that take turns within
        ROUNDS_TO_FILL rounds. Slots are then reserved for waiting requests: a request whose
        residuals are still in the cache does not verify again before theirs have come."""
        learnt = self._learnt
        pace = round_pages if learnt.pace is None else learnt.pace
        learnt.pace = pace + WEIGHT * (round_pages - pace)
        shared = num_slots - sum(r.num_slots for r in requests if r.key in learnt.staying)
        return shared < ROUNDS_TO_FILL * learnt.pace

    def _count(self, requests: Sequence[RoundView], verify: Collection[int]) -> None:
        for index, request in enumerate(requests):
            if index in verify:
                self._learnt.waited[request.key] = 0
            else:
                self._learnt.waited[request.key] += not request.is_pending

    def _choose_staying(self, requests: Sequence[RoundView], num_slots: int) -> None:
        learnt = self._learnt
        fitting = [r for r in requests if r.num_slots <= num_slots]
        together = len({page for r in fitting for page in r.pages}) + sum(r.spill for r in fitting)
        if together <= num_slots:
            learnt.staying = frozenset(r.key for r in fitting)
            return
        room = max(max(r.num_slots for r in fitting), ceil(FETCH_SHARE * num_slots))
        views = [
            ResidencyView(
                request_id=index,
                residual_bytes=request.num_slots,
                next_use=0,
                cycle_len=1,
                is_resident=request.key in learnt.staying,
            )
            for index, request in enumerate(fitting)
        ]
        chosen = choose_resident(views, num_slots - room)
        learnt.staying = frozenset(fitting[index].key for index in chosen)

    def _in_order(self, requests: Sequence[RoundView]) -> list[int]:
        """Return the indices of overdue requests, the oldest first; then of requests that stay in
        the cache; then of all others. The last two groups go by priority, then by rounds waited."""
        learnt = self._learnt

        def order(index: int) -> tuple[float, ...]:
            request = requests[index]
            waited = learnt.waited[request.key]
            if waited >= PATIENCE:
                return (0, -waited, -request.priority, index)
            if request.key in learnt.staying:
                return (1, -request.priority, -waited, index)
            return (2, -request.priority, -waited, index)

        return sorted(range(len(requests)), key=order)

    def _is_forced(self, request: RoundView, verify: Sequence[int], later: Sequence[int]) -> bool:
        is_first = not verify and not later
        return is_first and self._learnt.waited[request.key] >= PATIENCE

    @staticmethod
    def _ahead(
        later: Iterable[RoundView], filling: CacheFilling, round_pages: int
    ) -> tuple[int, ...]:
        """Return the pages to prefetch for requests that verify in a later round, in the order of
        these requests."""
        room = filling.num_slots - len(filling.pages) - filling.spill
        left = round_pages - len(filling.fetch)
        ahead: dict[int, None] = {}
        for request in later:
            # Pages that the request has in the cache already must stay there.
            own = [page for page in request.cached if page not in filling.pages]
            room -= len(own)
            missing = [p for p in request.missing if p not in filling.pages and p not in ahead]
            taken = missing[: max(min(room, left), 0)]
            ahead |= dict.fromkeys(taken)
            room, left = room - len(taken), left - len(taken)
            if room <= 0 or left <= 0 or len(taken) < len(missing):
                break
        return tuple(ahead)

    def _victims(
        self,
        requests: Sequence[RoundView],
        cache: CacheView,
        filling: CacheFilling,
        ahead: Collection[int],
    ) -> tuple[int, ...]:
        """Return the pages to evict: first pages of no running request, then pages of requests that
        verified most recently and so verify again last, then pages of requests that stay."""
        learnt = self._learnt
        shortfall = len(filling.fetch) + len(ahead) - cache.num_free
        if shortfall <= 0:
            return ()
        worth: dict[int, float] = {}
        for request in requests:
            value = inf if request.key in learnt.staying else learnt.waited[request.key]
            for page in request.cached:
                worth[page] = max(worth.get(page, -1.0), value)
        loose = sorted(
            [(worth.get(page, -1.0), page) for page in cache.cached if page not in filling.pages]
        )
        return tuple([page for _, page in loose[:shortfall]])
