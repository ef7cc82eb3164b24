"""Start of rounds: the device is told what to draft, and the link what to move."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import Arrivals, Drafter, PlainSteps
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.engine.started_round import StartedRound
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.planning.round_plan import RoundPlan
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.side_stream import SideStream

# Fewest plain steps that are worth a round of their own: the server has to keep up with rounds.
LEAST_STEPS_ON = 4


@dataclass(slots=True)
class RoundStarter:
    """Starter of rounds. plain: takes tokens without drafts, where the device holds all residuals.
    plain_steps: most of these tokens at once. over_at: time.perf_counter() when the last round was
    over, None once other forwards have come."""

    kv: PagedKVCache
    side: SideStream
    drafter: Drafter
    planner: ResidualPlanner
    arrivals: Arrivals
    plain: PlainSteps | None = None
    plain_steps: int = 0
    over_at: float | None = None

    def start(
        self, batch: RoundBatch, schedule: RoundSchedule, *, plans: bool = True
    ) -> StartedRound:
        """Begin a round on the side stream. plans: also decide which requests verify, where
        residuals move; otherwise the caller decides that later."""
        states, lens = batch.states, schedule.lens
        started = StartedRound(
            list(states),
            lens,
            PhaseTimer(self.kv.device),
            num_steps=max(lens),
            late=batch.late,
            held=schedule.held,
        )
        if plans and self.kv.plan.host_pages:
            started.plan = self.plan(batch, lens, schedule, drafts=any(lens))
        if any(schedule.alone) and not started.verify:
            started.lens = lens = list(schedule.alone)
            started.num_steps = max(lens)
        if self.arrivals.may_be_pending:
            pending = (i for i, state in enumerate(states) if self.arrivals.is_pending(state))
            started.pending = frozenset(pending)
        started.begun_at = time.perf_counter()
        if self.over_at is not None and self.plain is None:
            started.between_s = started.begun_at - self.over_at
        with self.side:
            started.timer.start()
            if any(lens):
                self._draft(batch, started)
            elif schedule.may_advance and self._can_advance(batch):
                self._advance(batch, started)
            started.timer.mark()
        return started

    def _draft(self, batch: RoundBatch, started: StartedRound) -> None:
        before = [len(state.drafts) for state in batch.states]
        started.made = self.drafter.draft(batch, started.lens)
        # A drafter may have found fewer tokens than it was asked for, and appended some of them.
        triples = zip(batch.states, before, started.unseen_lens, strict=True)
        started.lens = [len(state.drafts) - count + unseen for state, count, unseen in triples]
        started.num_steps = max(started.lens)

    def plan(
        self, batch: RoundBatch, lens: Sequence[int], schedule: RoundSchedule, *, drafts: bool
    ) -> RoundPlan:
        """Decide which requests verify, and start to move pages for them. lens: drafts that the
        round adds to those in the states. drafts: True if it adds any, or has added them."""
        held = batch.late | schedule.held
        drafts = drafts or any(schedule.alone)
        return self.planner.plan(
            batch.states, batch.pages, lens, schedule.budget, held, drafts=drafts
        )

    def _can_advance(self, batch: RoundBatch) -> bool:
        ready = [state for i, state in enumerate(batch.states) if i not in batch.late]
        # A request that has nothing left to take is about to leave.
        return (
            self.plain is not None
            and any(state.remaining > 0 for state in ready)
            and not any(state.drafts or state.tail for state in ready)
        )

    def _advance(self, batch: RoundBatch, started: StartedRound) -> None:
        assert self.plain is not None
        # The CPU needs the logits of every step for log-probabilities and for sampling.
        at_once = not batch.wants_logprobs and batch.is_greedy
        steps = self.plain_steps if at_once else 1
        started.is_plain = True
        started.made, logits = self.plain.advance(batch, steps, batch.late)
        started.num_steps = len(started.made.tokens)
        started.logits = None if at_once else logits

    def extend(self, started: StartedRound) -> StartedRound | None:
        """Begin another plain round before the tokens of this one are read, so that the device does
        not wait for the CPU. Return None where too few steps can follow without the CPU."""
        steps = started.steps_on(self.kv.geometry.page_size, self.plain_steps)
        if steps < LEAST_STEPS_ON:
            return None
        assert self.plain is not None
        assert started.made is not None
        states = list(started.states)
        timer = PhaseTimer(self.kv.device)
        more = StartedRound(states, [0] * len(states), timer, num_steps=steps, is_plain=True)
        more.begun_at = time.perf_counter()
        with self.side:
            timer.start()
            more.made = self.plain.advance_on(started.made, steps)
            timer.mark()
        return more
