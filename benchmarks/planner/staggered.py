"""Staggered schedule in simulated time: the planner of verifications, with a simulated link."""

from __future__ import annotations

from math import ceil

from planner.placement import Ask, Outcome
from planner.reservations import IterationBudget, VerificationPlanner
from planner.schedules import Drafting
from planner.simulation import Machine, RunningRequest, Step


class Link:
    """Link that moves bytes at a constant speed, the fetch that is due soonest first."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._left: dict[int, tuple[int, float]] = {}

    def start(self, request_id: int, num_bytes: int, due: int) -> None:
        self._left[request_id] = (due, num_bytes)

    def drop(self, request_id: int) -> None:
        self._left.pop(request_id, None)

    def is_moving(self, request_id: int) -> bool:
        return request_id in self._left

    def run(self, seconds: float) -> float:
        """Move bytes for so many seconds. Return the bytes moved."""
        can = budget = seconds * self.bytes_per_s
        for request_id, (due, left) in sorted(self._left.items(), key=lambda item: item[1][0]):
            amount = min(left, can)
            can -= amount
            # Less than a byte left is a rounding error.
            if left - amount < 1:
                del self._left[request_id]
            else:
                self._left[request_id] = (due, left - amount)
            if can <= 0:
                break
        return budget - can


class Staggered(Drafting):
    """Schedule that spreads verifications over iterations. The fetches for one overlap with the
    iterations before it."""

    # Budgets are updated when the mean length of an iteration has changed by this share.
    DRIFT = 0.05

    def __init__(self, machine: Machine, draft_len: int, num_requests: int, rooms: int = 2) -> None:
        super().__init__(machine, draft_len, num_requests, rooms)
        self.link = Link(machine.link_bytes_per_s)
        self.held: dict[int, int] = {}
        self.iteration_s = 0.0
        self._budget_s = 0.0
        self._budget_is_stale = True
        self.planner = VerificationPlanner(
            IterationBudget(0, 0, 1),
            max_draft_len=machine.max_draft_len,
            horizon=2 * machine.max_draft_len,
        )

    def join(self, request: RunningRequest) -> None:
        # First estimate, before any iteration has run.
        self.iteration_s = self.iteration_s or self.seconds((request,), ())
        super().join(request)
        if not self.planner.knows(request.request_id):
            self.ask(request)

    def leave(self, request: RunningRequest) -> None:
        self.forget(request)
        super().leave(request)

    def ask(self, request: RunningRequest) -> None:
        self._budget_is_stale = True
        fetch_bytes = self.fetch_bytes(request)
        ask = Ask(request.request_id, fetch_bytes, self.draft_len, request.num_drafts)
        self.planner.submit(ask)

    def forget(self, request: RunningRequest) -> None:
        self._budget_is_stale = True
        self.planner.cancel(request.request_id)
        self.link.drop(request.request_id)
        self.held.pop(request.request_id, None)

    def evict(self, request: RunningRequest) -> None:
        super().evict(request)
        self.forget(request)
        self.ask(request)

    def step(self) -> Step:
        self._refresh_budget()
        late = [r for r in self.planner.due if self.link.is_moving(r)]
        plan = self.planner.advance(late)
        for decision in plan.decisions:
            too_large = decision.outcome is Outcome.TOO_LARGE
            assert not too_large, f"has_room() admitted request {decision.request_id}, too large"
        for start in plan.starts:
            self.link.start(start.request_id, start.num_bytes, start.due)
            self.held[start.request_id] = start.num_bytes
        held = self.steady_bytes() + sum(self.held.values())
        verify_ids = set(plan.verify)
        verifying = [r for r in self.running if r.request_id in verify_ids]
        arrived = not any(self.link.is_moving(r.request_id) for r in verifying)
        assert arrived, "a verification is due before its residuals have arrived"
        others = [r for r in self.running if r.request_id not in verify_ids]
        drafting = [r for r in others if r.num_drafts < self.machine.max_draft_len]
        num_idle = len(others) - len(drafting)
        seconds = self.seconds(drafting, verifying) or self.iteration_s
        moved = self.link.run(seconds)
        for request in drafting:
            request.num_drafts += 1
        tokens = 0.0
        for request in verifying:
            tokens += self.verify(request)
            self.held.pop(request.request_id, None)
            if not request.is_done:
                self.ask(request)
        self.iteration_s += 0.1 * (seconds - self.iteration_s)
        stall_s = seconds * num_idle / len(self.running)
        return Step(seconds, tokens, stall_s, moved, held)

    def _refresh_budget(self) -> None:
        drifted = abs(self.iteration_s - self._budget_s) > self.DRIFT * self.iteration_s
        if not (drifted or self._budget_is_stale):
            return
        if drifted:
            self._budget_s = self.iteration_s
        self._budget_is_stale = False
        budget = IterationBudget(
            link_bytes=int(self.machine.link_bytes_per_s * self._budget_s),
            hbm_bytes=max(int(self.machine.kv_bytes - self.steady_bytes()), 0),
            # At most an even share per iteration. Once tokens cost more than reading the weights,
            # an iteration with many verifications loses more time than one with few saves.
            verifications=ceil(len(self.running) / (self.draft_len + 1)),
        )
        for request_id in self.planner.resize(budget):
            self.link.drop(request_id)
            self.held.pop(request_id, None)
