"""The loop: plan, draft, verify, commit, launch the next round.

Requests draft on anchors, in steps that need no decision in between. Then some or all of them
verify in one forward at target precision, and keep the drafts that the target agrees with. The
schedule decides how far each request drafts and which requests verify. A round in which drafts do
not pay takes tokens at target precision instead. A GPU begins the next round before the server
receives the tokens of this one. The server sees one iteration a round.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.committer import Committer
from sglang_kvspec.engine.draft_budgets import DraftBudgets, OneBudget
from sglang_kvspec.engine.observer import RoundObserver
from sglang_kvspec.engine.overlap import Overlap
from sglang_kvspec.engine.ports import Arrivals, PromptReader, VerifyScheduler
from sglang_kvspec.engine.residual_planner import ResidualPlanner
from sglang_kvspec.engine.round_scheduler import mean_context
from sglang_kvspec.engine.started_round import StartedRound
from sglang_kvspec.engine.starter import RoundStarter
from sglang_kvspec.engine.verifier import Verification, Verifier
from sglang_kvspec.planning.draft_budget import ALL_PAGES
from sglang_kvspec.runtime.draft_view import DraftReads
from sglang_kvspec.runtime.page_scorer import NoScores, PageScorer
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.ranks import Ranks, broadcast_drafts
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.spec_sampler import SpecSampler, VerifyResult
from sglang_kvspec.runtime.speeds import Speeds


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Result of a round, by request. emitted: tokens that a request emits, None for none; an entry
    without tokens belongs to a request that cannot go on. num_verified: drafts that were verified,
    None where tokens were taken without drafts. logits: of the emitted tokens, where
    log-probabilities are asked for. was_captured: all forwards were CUDA graph replays."""

    emitted: Sequence[VerifyResult | None]
    num_verified: list[int] | None
    logits: torch.Tensor | None
    was_captured: bool


@dataclass(slots=True)
class RoundLoop:
    """Loop of a server. speeds: measured speeds of the link and of iterations. reads: tokens that
    drafts read. budgets: share of its pages that each request's drafts read. captures: True if
    forwards are CUDA graph replays, as far as captures have room."""

    scheduler: VerifyScheduler
    planner: ResidualPlanner
    starter: RoundStarter
    verifier: Verifier
    committer: Committer
    overlap: Overlap
    observer: RoundObserver
    speeds: Speeds
    pages: PageKeeper
    arrivals: Arrivals
    prompt_reader: PromptReader
    sampler: SpecSampler
    ranks: Ranks
    reads: DraftReads = field(default_factory=DraftReads)
    budgets: DraftBudgets = field(default_factory=OneBudget)
    scorer: PageScorer = field(default_factory=NoScores)
    captures: bool = False

    def run_round(self, batch: RoundBatch) -> RoundResult:
        """Take the batch's requests through one round. Mutates their states."""
        self.pages.note_use(batch.pages)
        batch.late = self.planner.find_late(batch.states, batch.pages)
        started = self.overlap.take(batch)
        if started is None:
            schedule = self.scheduler.plan(batch.states, batch.late)
            started = self.starter.start(batch, schedule)
        self.starter.side.join()
        # Requests that were late when a pre-launched round began may have their residuals now.
        started.late = batch.late
        context = mean_context(batch.states)
        if started.is_plain:
            return self._take_plain(batch, started, context)
        return self._verify(batch, started, context)

    def _verify(self, batch: RoundBatch, started: StartedRound, context: float) -> RoundResult:
        """Verify the drafts of the requests whose turn it is. The CPU enqueues the forward while
        the device drafts."""
        is_idle, read = started.is_idle, self.reads.mean_tokens(batch.states)
        done = self.verifier.begin(batch, started)
        self.overlap.plan_next(batch, done.left)
        # From here on, the device waits for the next round.
        self.verifier.receive(batch, done)
        if self.arrivals.may_be_pending:
            self._note_drafts(batch, started, done)
        emitted = self.committer.commit(batch, done.rows, done.logits, done.top1)
        self.score(
            (place, batch.states[i], row.pages)
            for place, (i, row) in enumerate(done.rows.items())
            if (result := emitted[i]) is not None and result.tokens and batch.states[i].remaining
        )
        self.starter.over_at = time.perf_counter()
        if is_idle:
            self.observer.observe_idle(len(batch.states))
            self.starter.over_at = None
            if self.arrivals.may_be_pending:
                self.arrivals.wait()
        self.overlap.launch(batch)
        self.pages.flush()
        if not is_idle:
            self.observer.observe(started, done, emitted, context, read)
        was_captured = self.captures and done.was_captured and not is_idle
        logits = done.logits if batch.wants_logprobs else None
        return RoundResult(emitted, started.num_verified, logits, was_captured)

    def score(self, committed: Iterable[tuple[int, RequestState, torch.Tensor]]) -> None:
        """Choose the budgets of requests that committed tokens, and score the pages of those that
        read a share. committed: as for PageScorer.score()."""
        committed = list(committed)
        self.budgets.choose([state for _, state, _ in committed])
        self.scorer.score(each for each in committed if each[1].budget < ALL_PAGES)

    def _take_plain(self, batch: RoundBatch, started: StartedRound, context: float) -> RoundResult:
        """Commit the tokens of a plain round, behind which another plain round may follow at
        once."""
        self.overlap.plan_next(batch, None)
        self.overlap.extend(batch, started)
        emitted = self.committer.commit_plain(batch, started)
        self.starter.over_at = time.perf_counter()
        self.overlap.launch(batch)
        self.pages.flush()
        self.observer.observe_plain(started, context)
        return RoundResult(emitted, None, started.logits, self.captures)

    def _note_drafts(self, batch: RoundBatch, started: StartedRound, done: Verification) -> None:
        """Note the round's drafts, and which of them were made while residuals of their request
        were on the network."""
        for i, state in enumerate(batch.states):
            if started.lens[i]:
                ages_s, pending = started.draft_ages_s(i), i in started.pending
                self.arrivals.note_drafts(batch, i, ages_s, on_anchors=pending)
            if i in done.piggyback:
                pending = self.arrivals.is_pending(state)
                self.arrivals.note_drafts(batch, i, (0.0,), on_anchors=pending)

    # Between rounds

    def interrupt(self) -> None:
        """Let another forward, such as a prefill, run next. It waits for the pre-launched steps."""
        self.overlap.interrupt()
        self.starter.over_at = None

    def start_on_anchors(self, batch: RoundBatch) -> None:
        """Make the first draft of the batch's only request, an early start whose residuals are on
        the network. This also computes KV of the prompt's end, which later drafts may read."""
        self.interrupt()
        self.overlap.keep_tokens()
        (state,) = batch.states
        logits = self.prompt_reader.read_prompt_end(batch)
        self.sampler.draft(state, logits, mask=None)
        broadcast_drafts(self.ranks, [state])
        pending = self.arrivals.is_pending(state)
        self.arrivals.note_drafts(batch, 0, (0.0,), on_anchors=pending)

    def seconds_to_next(self, states: Sequence[RequestState]) -> list[float]:
        """Return the expected seconds until each request, which has just emitted tokens, emits
        more."""
        return self.scheduler.seconds_to_next(states, self.overlap.next)

    def report(self) -> dict[str, Any]:
        """Return what the loop has measured, for /server_info."""
        link = self.scheduler.link_share
        return {
            "timing": self.observer.report(),
            "link": None if link is None else asdict(link),
            "speeds": self.speeds.report(),
        }
