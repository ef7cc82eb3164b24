"""Planner of verifications: which requests fetch, verify or wait in each iteration.

The wait for a place has a bound. A request that has waited `patience` iterations is overdue.
Overdue requests go first, oldest first, whatever their priority. While the oldest has no place, no
other request reserves what the oldest may need. Every reservation ends within `horizon` iterations:
so long after the last reservation the rings are empty, and the oldest request gets its place. Of n
requests that wait at the same time, at most n - 1 are older than a given request. Each of these
delays the given request once. The given request waits at most

    patience + n * horizon

iterations (`wait_bound`). The bound holds while budgets do not shrink and no fetch is late. A late
fetch adds its lateness. A smaller budget adds the time until reservations under the larger budget
have ended.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import inf

from planner.placement import (
    Ask,
    Decision,
    Outcome,
    Place,
    find_again,
    find_place,
    is_too_large,
    release,
    reserve,
    shortest_fetch,
)
from planner.rings import Rings
from sglang_kvspec.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class IterationBudget:
    """Budget of one iteration. link_bytes: bytes that the link moves. hbm_bytes: bytes that fetched
    residuals may hold besides weights, anchors and resident residuals. verifications: most
    verifications."""

    link_bytes: int
    hbm_bytes: int
    verifications: int

    def __post_init__(self) -> None:
        if min(self.link_bytes, self.hbm_bytes, self.verifications) < 0:
            raise ConfigError(f"all numbers of an iteration's budget must be >= 0, got {self}")


@dataclass(frozen=True, slots=True)
class FetchStart:
    """Order to start moving num_bytes now. All bytes must be in HBM before iteration `due`. The
    link serves the fetch that is due soonest first."""

    request_id: int
    num_bytes: int
    due: int


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """Plan of one iteration.

    release: requests that verify in this iteration and whose fetched residuals leave after it.
    decisions: one for every request that waited for a place when the iteration began.
    """

    iteration: int
    starts: tuple[FetchStart, ...]
    verify: tuple[int, ...]
    release: tuple[int, ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class _Waiting:
    ask: Ask
    since: int


@dataclass(frozen=True, slots=True)
class _Placed:
    ask: Ask
    since: int
    place: Place


class VerificationPlanner:
    """Rings, and the places of requests in them. A request submits an Ask after every verification.
    The planner forgets the request when it verifies."""

    def __init__(
        self,
        budget: IterationBudget,
        *,
        max_draft_len: int,
        horizon: int | None = None,
        patience: int = 8,
    ) -> None:
        """Create an empty planner. horizon: number of iterations to plan ahead, by default
        max_draft_len + 1. Long fetches need a longer horizon."""
        horizon = max_draft_len + 1 if horizon is None else horizon
        if max_draft_len < 1 or horizon <= max_draft_len or patience < 0:
            raise ConfigError(
                "max_draft_len must be >= 1, horizon > max_draft_len and patience >= 0, "
                f"got max_draft_len={max_draft_len}, horizon={horizon}, patience={patience}"
            )
        self.now = 0
        self.max_draft_len = max_draft_len
        self.patience = patience
        self.rings = Rings(horizon, budget.link_bytes, budget.hbm_bytes, budget.verifications)
        self._waiting: dict[int, _Waiting] = {}
        self._placed: dict[int, _Placed] = {}

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(self._waiting)

    @property
    def placed(self) -> tuple[Place, ...]:
        return tuple(entry.place for entry in self._placed.values())

    @property
    def due(self) -> tuple[int, ...]:
        """Return the requests that fetched for a verification in the current iteration."""
        entries = self._placed.items()
        return tuple(r for r, e in entries if e.place.verify_at == self.now and e.place.moves)

    def knows(self, request_id: int) -> bool:
        """Return True if the request waits for a place or has one."""
        return request_id in self._waiting or request_id in self._placed

    def wait_bound(self, num_waiting: int) -> int:
        """Return the most iterations that one of num_waiting requests waits for a place. The module
        docstring derives this bound."""
        return self.patience + num_waiting * self.rings.horizon

    def submit(self, ask: Ask) -> None:
        """Ask for a place. The next `advance` decides."""
        if ask.request_id in self._waiting or ask.request_id in self._placed:
            raise ConfigError(f"request {ask.request_id} has already asked for its verification")
        self._waiting[ask.request_id] = _Waiting(ask, self.now)

    def cancel(self, request_id: int) -> bool:
        """Release all that a request holds, for an abort, a retraction or an early end.

        Return False if the request neither waits nor has a place, for example between a
        verification and the next ask.
        """
        if self._waiting.pop(request_id, None) is not None:
            return True
        entry = self._placed.pop(request_id, None)
        if entry is None:
            return False
        release(self.rings, entry.place, self.now)
        return True

    def resize(self, budget: IterationBudget) -> tuple[int, ...]:
        """Change the budgets. If places exceed them, reservations that have not started move to
        later iterations. A request waits again, with its age, if it finds no place or if HBM cannot
        hold its started fetch.

        Return the requests whose started fetches must be dropped because HBM cannot hold them.
        Started fetches may exceed a smaller link budget. They then arrive late.
        """
        self.rings.link.capacity = budget.link_bytes
        self.rings.hbm.capacity = budget.hbm_bytes
        self.rings.slots.capacity = budget.verifications
        self._shift()
        return self._drop_started()

    def advance(self, late: Collection[int] = ()) -> IterationPlan:
        """Plan the current iteration, and slide on to the next.

        late: requests whose fetch is due but not complete. They verify one iteration later.
        Reservations that have not started move later, too, to make room.
        """
        self._postpone(late)
        decisions = self._admit()
        starts, verify = [], []
        for request_id, entry in self._placed.items():
            place = entry.place
            if place.moves and place.first == self.now:
                starts.append(FetchStart(request_id, place.fetch_bytes, place.verify_at))
            if place.verify_at == self.now:
                verify.append(request_id)
        freed = tuple(r for r in verify if self._placed[r].place.moves)
        for request_id in verify:
            del self._placed[request_id]
        plan = IterationPlan(self.now, tuple(starts), tuple(verify), freed, decisions)
        self.rings.slide()
        self.now += 1
        return plan

    def _admit(self) -> tuple[Decision, ...]:
        """Find places for waiting requests in their order. Once an overdue request finds none,
        later requests get a place only if they cannot delay it."""
        decisions = []
        blocked = False
        least_failed: float = inf
        for entry in sorted(self._waiting.values(), key=self._order):
            ask = entry.ask
            if is_too_large(self.rings, ask):
                del self._waiting[ask.request_id]
                decisions.append(Decision(ask.request_id, Outcome.TOO_LARGE))
                continue
            # Places only fill up in this loop: a fetch finds none if a smaller one found none.
            hopeless = least_failed <= ask.fetch_bytes and not self._is_long(ask)
            place = None
            if not hopeless and (not blocked or self._cannot_delay_others(ask)):
                num_drafts = ask.num_drafts + self.now - entry.since
                place = find_place(self.rings, ask, num_drafts, self.now, self.max_draft_len)
                if place is None and ask.fetch_bytes:
                    least_failed = min(least_failed, ask.fetch_bytes)
            if place is None:
                blocked = blocked or self._is_overdue(entry)
                decisions.append(Decision(ask.request_id, Outcome.WAITING))
                continue
            reserve(self.rings, place, self.now)
            del self._waiting[ask.request_id]
            self._placed[ask.request_id] = _Placed(ask, entry.since, place)
            decisions.append(Decision(ask.request_id, Outcome.PLACED, place))
        return tuple(decisions)

    def _order(self, entry: _Waiting | _Placed) -> tuple[float, ...]:
        """Return a sort key: overdue requests first, oldest first, then the others by priority,
        deadline and age."""
        ask, since = entry.ask, entry.since
        deadline = inf if ask.deadline is None else ask.deadline
        if self._is_overdue(entry):
            return (0, since, -ask.priority, deadline, ask.request_id)
        return (1, -ask.priority, deadline, since, ask.request_id)

    def _is_overdue(self, entry: _Waiting | _Placed) -> bool:
        return self.now - entry.since >= self.patience

    def _is_long(self, ask: Ask) -> bool:
        return shortest_fetch(self.rings, ask.fetch_bytes) > self.max_draft_len

    def _cannot_delay_others(self, ask: Ask) -> bool:
        """Return True if a place for this request cannot delay another request. Without a fetch it
        takes only a slot, and there must be a slot for each known request."""
        known = len(self._waiting) + len(self._placed)
        return ask.fetch_bytes == 0 and self.rings.slots.capacity >= known

    def _postpone(self, late: Collection[int]) -> None:
        for request_id in sorted(late):
            entry = self._placed.get(request_id)
            if entry is None or entry.place.verify_at != self.now:
                raise ConfigError(f"request {request_id} is not due in iteration {self.now}")
            # Slots only smooth the work of an iteration, so a late request may exceed them.
            self.rings.slots.remove(0, 1)
            self.rings.slots.add(1, 1)
            self.rings.hbm.add(1, entry.place.fetch_bytes)
            place = replace(entry.place, verify_at=self.now + 1)
            self._placed[request_id] = replace(entry, place=place)
        if late:
            # Started fetches already held HBM at the same time as the late ones, so moving the
            # others always suffices.
            self._shift()
            assert not self.rings.hbm.is_over(), (
                "the fetches that have started exceed the HBM budget"
            )

    def _shift(self) -> None:
        """Find new places where a ring is over its capacity, for all reservations that have not
        started, soonest first. Each gets its old place, or the first after it that the rings allow.
        So lateness delays later requests, but none loses its turn. A request without a place waits
        again."""
        if not self.rings.is_over():
            return
        coming = [e for e in self._placed.values() if e.place.first >= self.now]
        for entry in coming:
            release(self.rings, entry.place, self.now)
        for entry in sorted(coming, key=lambda e: (e.place.verify_at, *self._order(e))):
            place = find_again(self.rings, entry.place, self.now)
            if place is None:
                self._lose_place(entry)
                continue
            reserve(self.rings, place, self.now)
            self._placed[entry.ask.request_id] = replace(entry, place=place)

    def _drop_started(self) -> tuple[int, ...]:
        """Cancel places of started fetches, last in order first, while they exceed HBM. Return the
        requests that lost their place."""
        ring = self.rings.hbm
        if not ring.is_over():
            return ()
        lost = []
        started = [e for e in self._placed.values() if e.place.first < self.now]
        for entry in sorted(started, key=self._order, reverse=True):
            before = ring.amounts()
            release(self.rings, entry.place, self.now)
            helps = any(
                was > ring.capacity and now < was
                for was, now in zip(before, ring.amounts(), strict=True)
            )
            if not helps:
                reserve(self.rings, entry.place, self.now)
                continue
            self._lose_place(entry)
            lost.append(entry.ask.request_id)
            if not ring.is_over():
                break
        return tuple(lost)

    def _lose_place(self, entry: _Placed) -> None:
        del self._placed[entry.ask.request_id]
        self._waiting[entry.ask.request_id] = _Waiting(entry.ask, entry.since)
