"""Drafter that takes steps with proposals only where they make tokens sooner."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import Drafter
from sglang_kvspec.engine.proposed_steps import ProposedSteps
from sglang_kvspec.planning.proposal_choice import ORDINARY, STOP, Drafting, choose_step
from sglang_kvspec.planning.proposals import Proposal
from sglang_kvspec.planning.step_clock import StepClock
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.ranks import Ranks


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of steps without context, measured at the start. ordinary: of one request. wide: of
    so many requests, by tokens of each; empty where no step has room."""

    ordinary: float
    wide: Callable[[int], Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class _Moment:
    """A batch before a draft step. lens: drafts that the round was to add. known, left: drafts of
    each request so far, and those that it lacks."""

    batch: RoundBatch
    lens: Sequence[int]
    known: list[int]
    left: list[int]

    @classmethod
    def of(cls, batch: RoundBatch, lens: Sequence[int]) -> _Moment:
        """Return the moment before the first step."""
        return cls(batch, lens, [len(state.drafts) for state in batch.states], list(lens))

    @classmethod
    def before(cls, batch: RoundBatch, goals: Sequence[int], lens: Sequence[int]) -> _Moment:
        """Return the present moment. goals: drafts that each request is to have."""
        known = [len(state.drafts) for state in batch.states]
        left = [max(goal - count, 0) for goal, count in zip(goals, known, strict=True)]
        return cls(batch, lens, known, left)

    @property
    def num_drafting(self) -> int:
        """Requests that the round drafts for."""
        return sum(more > 0 for more in self.lens)

    def requests(self, found: Mapping[int, Proposal]) -> list[Drafting]:
        """Return what choose_step() takes. found: proposals of requests that lack drafts."""
        none = Proposal()
        return [
            Drafting(
                count,
                count + left,
                len((proposal := found.get(i, none)).tokens),
                proposal.probability,
                state.acceptance.probability,
            )
            for i, (state, count, left, more) in enumerate(
                zip(self.batch.states, self.known, self.left, self.lens, strict=True)
            )
            if more
        ]


@dataclass(slots=True)
class _LastRound:
    """Round whose times are yet to be learned from. rids: requests that drafted. num_steps:
    ordinary steps, 0 where the CPU waited for the last step. begin_s, end_s: of draft(). name: of
    the kind of batch."""

    name: str
    clock: StepClock
    rids: list[str]
    num_steps: int
    begin_s: float
    end_s: float


class SelectiveDrafter:
    """Drafter for a device that makes drafts without proposals in steps that the CPU does not wait
    for.

    While proposals are not expected to pay, a round is that of the ordinary drafter. N-grams are
    then searched while the device drafts, and learn from the tokens that come. A round in which
    they are expected to pay chooses before each step, see choose_step(). It ends with a step that
    the CPU waited for, or with ordinary steps up to its goals.
    """

    def __init__(
        self,
        proposed: ProposedSteps,
        ordinary: Drafter,
        seconds: StepSeconds,
        ranks: Ranks,
        device: torch.device,
        *,
        always: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """ordinary: drafts one token a step. always: propose whatever it costs. now: seconds."""
        self._proposed, self._ordinary, self._seconds = proposed, ordinary, seconds
        self._ranks, self._always, self._now = ranks, always, now
        self._clocks: dict[tuple[int, bool], StepClock] = {}
        self._timer = PhaseTimer(device)
        self._last: _LastRound | None = None
        self._may_pay = always

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> DraftedTokens | None:
        """Make up to lens[i] drafts for request i. Append them to its state; those of ordinary
        steps are returned if only the device knows them."""
        begin_s = self._now()
        drafting = [i for i, more in enumerate(lens) if more]
        clock = self._clock(len(drafting), is_greedy=batch.is_greedy)
        rids = [batch.states[i].rid for i in drafting]
        self._observe_last(rids, begin_s)
        if not clock.wide:
            self._proposed.observe_ordinary(batch, lens)
            return self._ordinary.draft(batch, lens)
        name = f"{len(drafting)}{'' if batch.is_greedy else ' sampled'}"
        last = _LastRound(name, clock, rids, 0, begin_s, begin_s)
        if self._may_pay:
            return self._draft_proposed(batch, lens, last)
        return self._draft_ordinary(batch, lens, last)

    def _clock(self, num_requests: int, *, is_greedy: bool) -> StepClock:
        key = (num_requests, is_greedy)
        if key not in self._clocks:
            seconds = self._seconds
            self._clocks[key] = StepClock(seconds.ordinary, seconds.wide(num_requests))
        return self._clocks[key]

    def _observe_last(self, rids: Sequence[str], now_s: float) -> None:
        """Learn from the last round, which is over as this one begins."""
        last, self._last = self._last, None
        if last is None:
            return
        # Requests that come bring a prefill.
        follows = last.rids == rids
        if last.num_steps:
            (steps_s,) = self._timer.seconds()
            round_s = now_s - last.begin_s if follows else None
            last.clock.observe_ordinary(last.num_steps, steps_s, round_s)
        elif follows:
            last.clock.observe_waited_rest(now_s - last.end_s)
        self._proposed.note_times(last.name, last.clock.report_ms())

    def _draft_ordinary(
        self,
        batch: RoundBatch,
        lens: Sequence[int],
        last: _LastRound,
        declined: Mapping[int, Proposal] | None = None,
    ) -> DraftedTokens | None:
        """Draft without proposals. Learn what proposals would have brought while the device
        drafts. declined: proposals that the round has been found not to pay for, None to look."""
        moment = _Moment.of(batch, lens)
        self._timer.start()
        made = self._ordinary.draft(batch, lens)
        self._timer.mark()
        last.num_steps = max(lens)
        self._last = last
        self._proposed.observe_ordinary(batch, lens)
        found = self._look_up(moment) if declined is None else declined
        for i, proposal in found.items():
            state = batch.states[i]
            assert state.ngrams is not None
            state.ngrams.begin_trial(proposal, state.drafts[: moment.known[i]], len(state.output))
        self._may_pay = self._always or (
            declined is None and self._choose(moment, found, last.clock, 0.0) != ORDINARY
        )
        return made

    def _draft_proposed(
        self, batch: RoundBatch, lens: Sequence[int], last: _LastRound
    ) -> DraftedTokens | None:
        """Draft with proposals as far as they pay."""
        is_begun, spent_s = False, 0.0
        goals = [len(state.drafts) + more for state, more in zip(batch.states, lens, strict=True)]
        while any((moment := _Moment.before(batch, goals, lens)).left):
            step_begin_s = self._now()
            found = self._look_up(moment)
            choice = self._choose(moment, found, last.clock, spent_s)
            if choice == ORDINARY and not is_begun:
                return self._draft_ordinary(batch, lens, last, found)
            if choice == ORDINARY:
                self._proposed.observe_ordinary(batch, moment.left)
                return self._ordinary.draft(batch, moment.left)
            if choice == STOP:
                break
            if not is_begun:
                before_s, is_begun = self._now(), True
                self._proposed.begin(batch, moment.left)
                load_s = self._now() - before_s
                last.clock.load.observe(load_s)
                step_begin_s += load_s
            self._proposed.take(batch, {i: each.first(choice - 1) for i, each in found.items()})
            last.end_s = self._now()
            last.clock.wide[choice].observe(last.end_s - step_begin_s)
            spent_s = last.end_s - last.begin_s
        self._last = last
        return None

    def _look_up(self, moment: _Moment) -> dict[int, Proposal]:
        """Return what could be proposed to each request that lacks drafts."""
        found = {}
        for i, left in enumerate(moment.left):
            if not left:
                continue
            state = moment.batch.states[i]
            most = min(left - 1, self._proposed.most_proposed(state, moment.num_drafting))
            drafts = state.drafts[: moment.known[i]]
            ngrams = self._proposed.follow(state)
            ngrams.end_trial(state.output, drafts)
            found[i] = ngrams.look_up(drafts, most)
        return found

    def _choose(
        self, moment: _Moment, found: Mapping[int, Proposal], clock: StepClock, spent_s: float
    ) -> int:
        """Return rank 0's choice of the next step, see choose_step(). spent_s: since the round's
        drafts were begun, 0 before the first step."""
        if not spent_s and not any(proposal.tokens for proposal in found.values()):
            # Equal on all ranks.
            return ORDINARY
        requests = moment.requests(found)
        mine = choose_step(requests, spent_s, clock.times(), always=self._always)
        if mine == ORDINARY and not spent_s:
            clock.fade()
        (choice,) = self._ranks.numbers([mine], about="draft step")
        return choice
