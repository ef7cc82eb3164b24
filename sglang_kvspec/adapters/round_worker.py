"""The worker that drafts and verifies in rounds.

All requests draft at once, in steps that need no decision in between and that a GPU replays from
a graph without waiting for the CPU, and then verify at once. Where not all residuals lie in the KV
memory some of them verify, and the others go on drafting in the next round. SGLang sees one
iteration a round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_kvspec.adapters.ahead_worker import AheadWorker
from sglang_kvspec.planning.round_clock import WEIGHT
from sglang_kvspec.pools.transfers import received_together
from sglang_kvspec.runtime.chooser import Verified
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.forward_plan import Row, RowKind
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.round_lengths import mean_context
from sglang_kvspec.runtime.started_round import StartedRound


class RoundWorker(AheadWorker):
    """Takes rounds from their beginning to what SGLang is told of them, and learns from each."""

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self._timer = PhaseTimer(self.kv.device)
        # From the first step of the last round until its verification was enqueued; None where a
        # prefill came in between.
        self._enqueue_s: float | None = None
        self._fetch_wait_s = 0.0

    def _iterate(self, batch: Any) -> GenerationBatchResult:
        states = batch.spec_info.states
        self._check_states(batch, states)
        if self.decoding is not None:
            self.decoding.receive(batch.reqs)
        # SGLang has reserved slots for this round and the next one.
        pages = self._page_table(batch, states, 2 * self.speculative_num_draft_tokens)
        late = self.stepper.find_late(states, pages)
        started = self._begin_round(batch, states, pages, late)
        context = mean_context(states)
        self._from_graphs = self._graphs is not None and not started.is_idle
        finish = self._finish_plain if started.is_plain else self._finish_round
        verified, logits_output = finish(batch, states, pages, started)
        self._over_at = time.perf_counter()
        if started.is_idle:
            self._wait(states)
        self._begin_ahead(batch, states, pages, late)
        self.pages.flush()
        if not started.is_idle:
            self._observe(started, verified, context)
        num_verified = None if started.is_plain else started.num_verified
        return self._result(batch, states, verified, num_verified, logits_output)

    def _observe(
        self, started: StartedRound, verified: Sequence[Verified | None], context: float
    ) -> None:
        """Learn from a round that is over."""
        self.counters.iterations += 1
        step_s = started.step_seconds()
        if started.is_plain:
            self.stepper.speeds.note_iteration(step_s * started.num_steps)
            assert started.made is not None
            self.clock.observe_plain(len(started.made.order), context, step_s)
            return
        wait_s, verify_s = self._timer.seconds()
        self._fetch_wait_s += WEIGHT * (wait_s - self._fetch_wait_s)
        self.stepper.speeds.note_iteration(step_s * max(started.lens) + wait_s + verify_s)
        if not started.ends_prompts:
            self.clock.observe(
                started.lens,
                context,
                step_s * max(started.lens),
                verify_s,
                self._enqueue_s,
                [n for n, entry in zip(started.num_verified, verified, strict=True) if entry],
                started.between_s,
                started.num_beside,
            )
        idle = (n == 0 and entry is None for n, entry in zip(started.lens, verified, strict=True))
        self.counters.waits += sum(idle)

    def _wait(self, states: list[RequestState]) -> None:
        """In a round in which nobody can go on before something arrives."""
        self.counters.waits += len(states)
        self._over_at = None
        self._await_residuals()

    # Ending a round

    def _finish_round(
        self,
        batch: Any,
        states: list[RequestState],
        pages: list[torch.Tensor],
        started: StartedRound,
    ) -> tuple[list[Verified | None], Any]:
        """Verify the drafts of those whose turn it is. The CPU enqueues that while the device
        drafts."""
        on_device = started.lens if started.made is not None else [0] * len(states)
        num_drafts = [len(s.drafts) + n for s, n in zip(states, on_device, strict=True)]
        verify = started.verify
        rows = {i: self._verify_row(states[i], num_drafts[i], pages[i]) for i in verify}
        beside = self._rows_beside(batch, states, pages, num_drafts, verify)
        self.spoiled.drop(batch.reqs, rows)
        started.num_verified = [n if i in rows else 0 for i, n in enumerate(num_drafts)]
        started.ends_prompts = any(states[i].tail for i in rows)
        self._timer.start()
        if started.plan is not None:
            self.stepper.await_fetches(started.plan, pages)
        self._timer.mark()
        logits_output = LogitsProcessorOutput(next_token_logits=None)
        more: DraftedTokens | None = None
        if rows:
            logits_output, more = self._verify_rows(batch, states, rows, started.made, beside)
        self._timer.mark()
        enqueue_s = time.perf_counter() - started.begun_at
        self._enqueue_s = None if started.is_held_up else enqueue_s
        left = [0 if i in rows else n for i, n in enumerate(num_drafts)]
        if more is not None:
            self.counters.observe_beside(len(more.order))
            started.num_beside = len(more.order)
            left = [sum(pair) for pair in zip(left, more.lens, strict=True)]
        drafted = [tokens for tokens in (started.made, more) if tokens is not None]
        logits = logits_output.next_token_logits
        likeliest = self._likeliest(batch, states, rows, logits)
        self._plan_next(states, started.late, left)
        # The device waits from here on, for the next round.
        here = received_together([*(each.tokens for each in drafted), *likeliest])
        for each, tokens in zip(drafted, here, strict=False):
            for i, made in each.deliver(tokens).items():
                states[i].drafts.extend(made)
        if self._may_lack:
            self._note_drafts(batch, states, started, more)
        verified = self._judge(batch, states, rows, logits, here[len(drafted) :])
        if not batch.return_logprob:
            # Nobody reads them any more, and they are large.
            logits_output.next_token_logits = None
        return verified, logits_output

    def _note_drafts(
        self,
        batch: Any,
        states: list[RequestState],
        started: StartedRound,
        beside: DraftedTokens | None,
    ) -> None:
        """Of steps that came from graphs, and of a verification's forward."""
        by_graphs = self._graphs is not None
        for i, (req, state) in enumerate(self._zip(batch, states)):
            if self.decoding is not None:
                if by_graphs:
                    ages_s = started.draft_ages_s(i)
                    on_anchors = i in started.lacking
                    self.decoding.note_drafts(state, ages_s, on_anchors=on_anchors)
                continue
            count = started.lens[i] if by_graphs and i in started.lacking else 0
            if beside is not None and self._is_lacking(state):
                count += beside.lens[i]
            if count:
                self._note_early_drafts(req, count)

    def _finish_plain(
        self,
        batch: Any,
        states: list[RequestState],
        pages: list[torch.Tensor],
        started: StartedRound,
    ) -> tuple[list[Verified | None], Any]:
        """Take over tokens that were not drafted. A request that came meanwhile has none."""
        assert started.made is not None
        self._plan_next(states, started.late)
        self._ahead = self._go_on(batch, states, started)
        if started.logits is not None:
            order = started.made.order
            logits = started.logits[: len(order)]
            rows = {i: Row(RowKind.VERIFY, states[i].committed_len, 1, pages[i]) for i in order}
            likeliest = self._likeliest(batch, states, rows, logits)
            verified = self._judge(batch, states, rows, logits, likeliest)
            return verified, LogitsProcessorOutput(next_token_logits=logits)
        emitted: list[Verified | None] = [None] * len(states)
        for i, tokens in started.made.deliver().items():
            before = states[i].committed_len
            for _ in tokens if self.decoding is not None else ():
                self.decoding.note_verification(states[i], 1)
            states[i].commit(tokens)
            self.pages.commit(pages[i], before, states[i].committed_len)
            self.counters.observe_plain(len(tokens))
            emitted[i] = Verified(tokens, None)
        return emitted, LogitsProcessorOutput(next_token_logits=None)

    def _expected_s(self, states: list[RequestState], lengths: list[int]) -> dict[int, float]:
        if self._graphs is None or not self._next_lens:
            # The next round is not planned yet.
            return {}
        seconds = self.clock.cost(mean_context(states)).seconds(self._next_lens)
        if not any(self._next_lens):
            # As many steps as a round without drafts takes tokens.
            seconds *= self._plain_steps
        return {i: seconds for i, n in enumerate(lengths) if n > 1}

    # Control plane

    def kvspec_report(self) -> dict[str, Any]:
        clock = self.clock
        timing = {
            # By the number of requests that drafted.
            "draft_iter_ms": {str(n): s * 1e3 for n, s in sorted(clock.draft_step_s.items())},
            # What verifications waited for residuals, after the drafts.
            "fetch_wait_ms": self._fetch_wait_s * 1e3,
            "verify_ms": clock.verify_s * 1e3,
            "plain_step_ms": clock.plain_step_s * 1e3,
            # From a round to the next, as far as it is known; least of a round that verifies.
            "between_ms": clock.between_s * 1e3,
            "enqueue_ms": clock.enqueue_s * 1e3,
        }
        link = self._lengths.link_share
        return super().kvspec_report() | {
            "timing": timing,
            "link": None if link is None else asdict(link),
        }
