"""Overlap of rounds: the device begins a round before the server receives the last one's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import VerifyScheduler
from sglang_kvspec.engine.schedule import RoundSchedule
from sglang_kvspec.engine.started_round import StartedRound
from sglang_kvspec.engine.starter import RoundStarter
from sglang_kvspec.runtime.draft_rows import drafts_fit
from sglang_kvspec.runtime.pages import PageKeeper


class Overlap(Protocol):
    """Pre-launch of rounds, as the loop uses it. next: schedule of the round after this one, once
    it is planned."""

    next: RoundSchedule | None

    def take(self, batch: RoundBatch) -> StartedRound | None:
        """Return the pre-launched round, for the batch as it is now; None if no round runs."""

    def plan_next(self, batch: RoundBatch, num_drafts: Sequence[int] | None) -> None:
        """Plan the round after this one, while the device is still busy with this one. num_drafts:
        drafts that requests will have by then; by default, the drafts that they have now."""

    def extend(self, batch: RoundBatch, started: StartedRound) -> None:
        """Begin another plain round before the tokens of this one are read, where possible."""

    def launch(self, batch: RoundBatch) -> None:
        """Begin the round after this one, where possible."""

    def interrupt(self) -> None:
        """Let another forward follow the steps of the pre-launched round."""

    def keep_tokens(self) -> None:
        """Copy the tokens of the pre-launched round, whose tensors another forward will use."""

    def cancel(self) -> None:
        """Cancel the pre-launched round, because the weights change."""


class NoOverlap:
    """No pre-launch, for a device that works synchronously."""

    next: RoundSchedule | None = None

    def take(self, batch: RoundBatch) -> None:
        """Return None: no round has begun."""

    def plan_next(self, batch: RoundBatch, num_drafts: Sequence[int] | None) -> None:
        """Do nothing: the next round is planned when it begins."""

    def extend(self, batch: RoundBatch, started: StartedRound) -> None:
        """Do nothing: tokens are read as they are made."""

    def launch(self, batch: RoundBatch) -> None:
        """Do nothing: the next round begins when the server asks for it."""

    def interrupt(self) -> None:
        """Do nothing: no round has begun."""

    def keep_tokens(self) -> None:
        """Do nothing: no round has begun."""

    def cancel(self) -> None:
        """Do nothing: no round has begun."""


@dataclass(slots=True)
class OverlappedRounds:
    """Pre-launch of rounds beside the main stream, which waits for them before any other forward.

    What such a round wrote for requests that have left meanwhile is overwritten. Where residuals
    move, the round's verifications and their fetches are planned as soon as it runs. They are
    planned again if a prefill comes before its end.

    next: schedule of the round after the running one. ahead: the round that was launched.
    """

    starter: RoundStarter
    scheduler: VerifyScheduler
    pages: PageKeeper
    max_draft_len: int
    next: RoundSchedule | None = None
    ahead: StartedRound | None = None

    def take(self, batch: RoundBatch) -> StartedRound | None:
        """Return the pre-launched round, see Overlap.take. Plan its verifications if they are
        undecided. The caller makes the main stream wait for its steps."""
        started = None if self.ahead is None else self.ahead.for_batch(batch.states)
        kv = self.starter.kv
        if started is not None and kv.plan.host_pages and (started.plan is None or started.is_idle):
            # The device drafts already, so the CPU has time to choose which requests verify.
            assert self.next is not None
            self._cancel_plan()
            schedule = replace(self.next, held=started.held)
            # Drafts that are in the states already are drafts of this round, too.
            started.plan = self.starter.plan(
                batch, started.unseen_lens, schedule, drafts=any(started.lens)
            )
        elif started is not None and started.plan is not None:
            self.starter.planner.fetch_ahead(started.plan)
        self.ahead = None
        return started

    def plan_next(self, batch: RoundBatch, num_drafts: Sequence[int] | None) -> None:
        """Plan the next round, see Overlap.plan_next."""
        self.next = self.scheduler.plan(batch.states, batch.late, num_drafts)

    def extend(self, batch: RoundBatch, started: StartedRound) -> None:
        """Begin another plain round, see Overlap.extend."""
        assert self.next is not None
        if not any(self.next.lens) and self.next.may_advance and self._can_launch(batch):
            self.ahead = self.starter.extend(started)

    def launch(self, batch: RoundBatch) -> None:
        """Begin the next round, see Overlap.launch.

        Full pages are encoded once the device drafts, although these drafts read them in the
        window. Encoding writes nothing that these drafts read, and whatever reuses the window slots
        comes after the drafts.
        """
        if self.ahead is not None or not self._can_launch(batch):
            return
        assert self.next is not None
        states, kv = batch.states, self.starter.kv
        rooms = [state.cap_len(self.max_draft_len) - len(state.drafts) for state in states]
        lens = [min(pair) for pair in zip(self.next.lens, rooms, strict=True)]
        if not any(lens) and not self.next.may_advance:
            # Drafts piggyback on that round's verifications, which are decided when it begins.
            return
        starts = [(state.next_position, n) for state, n in zip(states, lens, strict=True)]
        if not any(lens) or not drafts_fit(kv, starts):
            # Flush first: plain steps must read encoded pages, and flushing frees window slots.
            self.pages.flush()
        self.next = replace(self.next, lens=lens)
        self.ahead = self.starter.start(batch, self.next, plans=False)
        self.pages.flush()
        if kv.plan.host_pages and not batch.late and not self.starter.arrivals.come_with_requests:
            # The residuals of its verifications move while the server sends this round's tokens.
            self.ahead.plan = self.starter.planner.plan_ahead(
                states,
                batch.pages,
                self.ahead.unseen_lens,
                self.next.budget,
                self.next.held,
                drafts=any(self.ahead.lens),
            )

    def interrupt(self) -> None:
        """Let another forward follow, see Overlap.interrupt. The round's verifications are planned
        again."""
        self.starter.side.join()
        if self.ahead is not None:
            self.ahead.is_interrupted = True
            self._cancel_plan()

    def keep_tokens(self) -> None:
        """Copy the round's tokens, see Overlap.keep_tokens."""
        if self.ahead is not None:
            self.ahead.keep_tokens()

    def cancel(self) -> None:
        """Cancel the pre-launched round and its plan, see Overlap.cancel."""
        self.starter.side.join()
        self._cancel_plan()
        self.ahead = None

    def _cancel_plan(self) -> None:
        """Cancel the verification plan of the launched round."""
        if self.ahead is not None and self.ahead.plan is not None:
            self.starter.planner.cancel()
            self.ahead.plan = None

    def _can_launch(self, batch: RoundBatch) -> bool:
        return (
            not batch.wants_logprobs
            and any(state.remaining > 0 for state in batch.states)
            and batch.is_greedy
        )
