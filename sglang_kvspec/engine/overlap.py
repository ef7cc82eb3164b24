"""Overlap of rounds: the device begins the next one before the server hears of the last one."""

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
    """What the loop asks for around a round. next: schedule of the round after this one, once it
    is planned."""

    next: RoundSchedule | None

    def take(self, batch: RoundBatch) -> StartedRound | None:
        """Return the round that runs already, for the batch as it is now; None for none."""

    def plan_next(self, batch: RoundBatch, num_drafts: Sequence[int] | None) -> None:
        """Plan the round after this one, while the device is still busy with this one. num_drafts:
        drafts that requests have by then, those they have now unless given."""

    def extend(self, batch: RoundBatch, started: StartedRound) -> None:
        """Let a plain round go on before its tokens are read, where that is possible."""

    def launch(self, batch: RoundBatch) -> None:
        """Begin the round after this one, where that is possible."""

    def hold_up(self) -> None:
        """Let another forward follow what has begun."""

    def keep_tokens(self) -> None:
        """Let a forward use the tensors in which the tokens of the begun round lie."""

    def cancel(self) -> None:
        """Forget the round that has begun: it ran with other weights."""


class NoOverlap:
    """Rounds of a machine which does what it is told at once."""

    next: RoundSchedule | None = None

    def take(self, batch: RoundBatch) -> None:
        """No round has begun."""

    def plan_next(self, batch: RoundBatch, num_drafts: Sequence[int] | None) -> None:
        """The next round is planned when it begins."""

    def extend(self, batch: RoundBatch, started: StartedRound) -> None:
        """Tokens are read as they are made."""

    def launch(self, batch: RoundBatch) -> None:
        """The next round begins when the server asks for it."""

    def hold_up(self) -> None:
        """No round has begun."""

    def keep_tokens(self) -> None:
        """No round has begun."""

    def cancel(self) -> None:
        """No round has begun."""


@dataclass(slots=True)
class OverlappedRounds:
    """Launches rounds beside the main stream, which waits for them before any other forward.

    What such a round wrote for requests that have left meanwhile is overwritten. Where residuals
    move, which requests verify at its end, and what is fetched for that, is decided as soon as it
    runs, and again if a prefill has come before its end.

    next: schedule of the round after the running one. ahead: the round that was launched.
    """

    starter: RoundStarter
    scheduler: VerifyScheduler
    pages: PageKeeper
    max_draft_len: int
    next: RoundSchedule | None = None
    ahead: StartedRound | None = None

    def take(self, batch: RoundBatch) -> StartedRound | None:
        """As Overlap.take. The main stream follows the round's steps."""
        started = None if self.ahead is None else self.ahead.for_batch(batch.states)
        kv = self.starter.kv
        if started is not None and kv.plan.host_pages and (started.plan is None or started.is_idle):
            # The device drafts already, which leaves the CPU time to choose which requests verify.
            assert self.next is not None
            self._cancel_plan()
            schedule = replace(self.next, held=started.held)
            started.plan = self.starter.plan(batch, started.lens, schedule)
        elif started is not None and started.plan is not None:
            self.starter.planner.fetch_ahead(started.plan)
        self.ahead = None
        return started

    def plan_next(self, batch: RoundBatch, num_drafts: Sequence[int] | None) -> None:
        """As Overlap.plan_next."""
        self.next = self.scheduler.plan(batch.states, batch.late, num_drafts)

    def extend(self, batch: RoundBatch, started: StartedRound) -> None:
        """As Overlap.extend."""
        assert self.next is not None
        if not any(self.next.lens) and self.next.may_advance and self._can_launch(batch):
            self.ahead = self.starter.extend(started)

    def launch(self, batch: RoundBatch) -> None:
        """As Overlap.launch.

        Full pages are encoded once the device drafts, which reads them in the window: encoding them
        writes nothing that those drafts read, and whatever gets their places in the window is
        behind the drafts.
        """
        if self.ahead is not None or not self._can_launch(batch):
            return
        assert self.next is not None
        states, kv = batch.states, self.starter.kv
        rooms = [state.cap_len(self.max_draft_len) - len(state.drafts) for state in states]
        lens = [min(pair) for pair in zip(self.next.lens, rooms, strict=True)]
        if not any(lens) and not self.next.may_advance:
            # Drafts piggyback on the verifications of that round, which its begin decides.
            return
        starts = [(state.next_position, n) for state, n in zip(states, lens, strict=True)]
        if not any(lens) or not drafts_fit(kv, starts):
            # Flush first: plain steps must read encoded pages, and flushing frees window slots.
            self.pages.flush()
        self.next = replace(self.next, lens=lens)
        self.ahead = self.starter.start(batch, self.next, plans=False)
        self.pages.flush()
        if kv.plan.host_pages and not batch.late and not self.starter.arrivals.come_with_requests:
            # What it verifies is fetched while the server sends this round's tokens.
            self.ahead.plan = self.starter.planner.plan_ahead(
                states, batch.pages, lens, self.next.budget, self.next.held
            )

    def hold_up(self) -> None:
        """As Overlap.hold_up. The round's verifications are planned again."""
        self.starter.side.join()
        if self.ahead is not None:
            self.ahead.is_held_up = True
            self._cancel_plan()

    def keep_tokens(self) -> None:
        """As Overlap.keep_tokens."""
        if self.ahead is not None:
            self.ahead.keep_tokens()

    def cancel(self) -> None:
        """As Overlap.cancel."""
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
