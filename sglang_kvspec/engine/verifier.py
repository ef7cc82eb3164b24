"""Verification of some requests in one forward, on which other requests may piggyback a draft."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.committer import Committer
from sglang_kvspec.engine.eager_verify import EagerVerify
from sglang_kvspec.engine.ports import CapturedVerify, PageGuard, VerifyScheduler
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.started_round import StartedRound
from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.kv.transfers import received_together
from sglang_kvspec.runtime.draft_view import DraftView, draft_forward_row
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.grammar import mask_after
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.ranks import Ranks, broadcast_drafts
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.spec_sampler import SpecSampler


@dataclass(slots=True)
class Verification:
    """Verification that was enqueued, and what the CPU does not know yet.

    rows: rows that verify, by request. logits: of these rows, [num_tokens, vocab]; None where no
    request verifies. piggyback: rows of other requests that drafted in the same forward.
    draft_logits: of these rows. drafted: drafts that only the device knows. top1: as from
    Committer.top1(). left: drafts that every request has afterwards. was_captured: the forward was
    a replay.
    """

    rows: dict[int, Row]
    piggyback: dict[int, Row] = field(default_factory=dict)
    logits: torch.Tensor | None = None
    draft_logits: torch.Tensor | None = None
    drafted: list[DraftedTokens] = field(default_factory=list)
    top1: Sequence[torch.Tensor] = ()
    left: list[int] = field(default_factory=list)
    was_captured: bool = True


@dataclass(slots=True)
class Verifier:
    """Runner of verifications. Committer judges the drafts.

    captured: replays verifications, None where each is an eager forward. eager: runs verifications
    that are not replayed. most_piggyback: most requests that piggyback a draft on a verification.
    view: selects the pages that piggyback drafts read, None for all. drafts_eagerly: True if an
    eager forward has room for piggyback drafts.
    """

    eager: EagerVerify
    captured: CapturedVerify | None
    scheduler: VerifyScheduler
    planner: ResidualPlanner
    guard: PageGuard
    sampler: SpecSampler
    ranks: Ranks
    timer: PhaseTimer
    page_size: int
    view: DraftView | None = None
    most_piggyback: int = 0
    drafts_eagerly: bool = True

    def begin(self, batch: RoundBatch, started: StartedRound) -> Verification:
        """Enqueue the verifications of a round behind its drafts. Note in `started` what is
        verified, and when that was enqueued."""
        states = batch.states
        made = started.made
        pairs = zip(states, started.unseen_lens, strict=True)
        num_drafts = [len(state.drafts) + unseen for state, unseen in pairs]
        rows = {
            i: self._verify_row(states[i], num_drafts[i], batch.pages[i]) for i in started.verify
        }
        piggyback = self._piggyback_rows(batch, num_drafts, rows) if self.most_piggyback else {}
        self.guard.drop(batch, rows)
        started.num_verified = [n if i in rows else 0 for i, n in enumerate(num_drafts)]
        started.ends_prompts = any(states[i].tail for i in rows)
        self.timer.start()
        if started.plan is not None:
            self.planner.await_fetches(started.plan, batch.pages)
        self.timer.mark()
        done = Verification(rows, left=[0 if i in rows else n for i, n in enumerate(num_drafts)])
        done.drafted = [] if made is None else [made]
        if rows:
            self._run(batch, done, made, piggyback)
            started.num_piggyback = len(done.piggyback)
        self.timer.mark()
        started.enqueue_s = time.perf_counter() - started.begun_at
        done.top1 = Committer.top1(batch, rows, done.logits)
        return done

    def _run(
        self,
        batch: RoundBatch,
        done: Verification,
        made: DraftedTokens | None,
        piggyback: dict[int, Row],
    ) -> None:
        """Run the forward, and note its results in `done`."""
        out = None
        if self.captured is not None:
            out = self.captured.run(batch, done.rows, made, piggyback)
        if out is None:
            done.was_captured = False
            beside = piggyback if self.drafts_eagerly else {}
            out = self.eager.run(batch, done.rows, made, beside)
        done.logits = out.logits
        if out.drafted is None:
            return
        done.piggyback, done.draft_logits = piggyback, out.draft_logits
        for i in piggyback:
            done.left[i] += 1
        # For requests that are not greedy, the CPU chooses the drafts from draft_logits.
        order = [i if batch.states[i].is_greedy else -1 for i in out.drafted.order]
        if any(i >= 0 for i in order):
            tokens = self.ranks.tensor(out.drafted.tokens)
            done.drafted.append(replace(out.drafted, tokens=tokens, order=order))

    def receive(self, batch: RoundBatch, done: Verification) -> None:
        """Wait for the device, and append the drafts that it made to the states."""
        here = received_together([*(each.tokens for each in done.drafted), *done.top1])
        for each, tokens in zip(done.drafted, here, strict=False):
            for i, drafts in each.deliver(tokens).items():
                batch.states[i].drafts.extend(drafts)
        done.top1 = here[len(done.drafted) :]
        sampled = []
        for place, i in enumerate(done.piggyback):
            state = batch.states[i]
            if not state.is_greedy:
                assert done.draft_logits is not None
                logits = done.draft_logits[place : place + 1]
                self.sampler.draft(state, logits, mask_after(state.grammar, state.drafts, logits))
                sampled.append(state)
        if sampled:
            broadcast_drafts(self.ranks, sampled)

    def _piggyback_rows(
        self, batch: RoundBatch, num_drafts: Sequence[int], rows: Mapping[int, Row]
    ) -> dict[int, Row]:
        """Return the rows of piggyback drafts, of the requests with the fewest drafts, as many as
        there is room for. One read of the weights then serves verifications and drafts."""
        scheduler = self.scheduler
        ready = [
            i
            for i, state in enumerate(batch.states)
            if i not in rows
            and (scheduler.piggybacks_sampled or state.is_greedy)
            and scheduler.piggybacks(state, num_drafts[i])
        ]
        ready = sorted(ready, key=lambda i: num_drafts[i])[: self.most_piggyback]
        rows = {}
        for i in sorted(ready):
            state = batch.states[i]
            position = state.committed_len + num_drafts[i]
            rows[i] = draft_forward_row(state, position, batch.pages[i], self.page_size, self.view)
        return rows

    def _verify_row(self, state: RequestState, num_drafts: int, pages: torch.Tensor) -> Row:
        """Return the row of all tokens without verified KV, the last num_drafts of them drafts."""
        length = len(state.tail) + 1 + num_drafts
        num_pages = -(-(state.verified_len + length) // self.page_size)
        return Row(RowKind.VERIFY, state.verified_len, length, pages[:num_pages])
