"""Beginning the rounds in which requests draft and verify, on a GPU ahead of SGLang."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_kvspec.adapters.allocation_warm_up import warm_up_allocation
from sglang_kvspec.adapters.drafters import (
    LEAST_STEPS_ON,
    PLAIN_STEPS,
    EagerDrafter,
    GraphStepper,
)
from sglang_kvspec.adapters.forward_capture import ForwardCapture
from sglang_kvspec.adapters.requests import takes_argmax
from sglang_kvspec.adapters.verify_graphs import VerifyGraphs, sizes_of
from sglang_kvspec.adapters.verifying_worker import VerifyingWorker
from sglang_kvspec.planning.round_clock import RoundClock
from sglang_kvspec.planning.round_step import RoundBudget
from sglang_kvspec.pools.device_kv import DeviceKV
from sglang_kvspec.runtime.beside_rows import MOST_BESIDE
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.draft_rows import drafts_fit
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.ranks import agree_on_drafts
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.round_lengths import RoundLengths
from sglang_kvspec.runtime.round_stepper import RoundStepper
from sglang_kvspec.runtime.side_stream import SideStream
from sglang_kvspec.runtime.started_round import StartedRound

# A guess for the CPU, where no graph is timed at the start.
CPU_STEP_S = 1e-3


class AheadWorker(VerifyingWorker):
    """draft_len auto: each round's lengths are those with the most expected tokens a second, by
    every request's acceptance so far and by what rounds took.

    A GPU begins the next round before SGLang hears of the last one, so that it works while SGLang
    sends tokens and schedules. That round runs beside the main stream, which waits for it before
    any other forward; what it wrote for requests that have left meanwhile is overwritten. Where
    residuals move, who verifies at its end, and what is fetched for that, is decided as soon as it
    runs, and again if a prefill has come before its end.
    """

    def init_cuda_graphs(self) -> None:
        """On a GPU this captures the graphs of a step."""
        runner = self._target_worker.model_runner
        self._graphs: GraphStepper | None = None
        # Where residuals stay, all verify at once. One that came from another server does not draft
        # for longer than it has to.
        self._most_beside = 0
        if self.kv.plan.host_pages and self.decoding is None and self.config.max_draft_len:
            self._most_beside = min(runner.max_running_requests, MOST_BESIDE)
        if isinstance(self.kv, DeviceKV):
            assert isinstance(self.attention, DeviceAttention)
            self.attention.warm_up(self.config.max_draft_len)
            warm_up_allocation(
                self.token_to_kv_pool_allocator,
                self.req_to_token_pool.req_to_token,
                runner.max_running_requests,
            )
            # A prefill server makes no steps.
            if self.server_args.disaggregation_mode != "prefill":
                self._capture(runner)
        self._eager = EagerDrafter(self)
        self._holds_all = self._graphs is not None and not self.kv.plan.host_pages
        page = self.kv.plan.page_bytes
        both = page.residual if self.config.target == "exact" else page.anchor + page.residual
        step_s, row_per_token = CPU_STEP_S, None
        if self._graphs is not None:
            step_s = self._graphs.empty_step_s
            # Anchors are read about as fast as weights.
            weights = sum(part.nbytes for part in runner.model.parameters())
            row_per_token = page.anchor / self.kv.geometry.page_size * step_s / weights
        self.clock = RoundClock(
            step_s,
            both / page.anchor,
            has_plain=self._holds_all,
            row_per_token=row_per_token,
            beside=self._most_beside > 0,
        )
        self._lengths = RoundLengths(self.config, self.clock, self.stepper, self.ranks)
        self._side = SideStream(self.kv.device)
        self._ahead: StartedRound | None = None
        # time.perf_counter() when the last round was over; None once other forwards have come.
        self._over_at: float | None = None
        # Of the round after the one that runs, decided while the device is still busy with that.
        self._next_lens: list[int] = []
        self._next_budget: RoundBudget | None = None
        if self.apart is not None:
            self.apart.write_behind(self._hold_up)

    def _capture(self, runner: Any) -> None:
        longest, attention = self.config.max_draft_len, self.attention
        beside = self._most_beside
        sizes = sizes_of(runner, attention, longest, beside) if longest else ()
        tokens = [beside + size.num_tokens for size in sizes]
        forward = ForwardCapture(runner, max([runner.max_running_requests, *tokens]))
        parts = (self.kv, longest, self.chooser, self.ranks)
        self._graphs = GraphStepper(runner, forward, attention, *parts)
        if sizes:
            parts = (runner, forward, attention, longest, sizes)
            self._verify_graphs = VerifyGraphs(*parts, beside)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        self.stepper = RoundStepper(self.kv)

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        self._hold_up()
        self._over_at = None
        return super()._prefill(batch)

    def _begin_drafts(self, batch: Any, state: RequestState) -> None:
        """Its first draft, which gives the end of its prompt KV that further ones may read."""
        if self._ahead is not None:
            self._ahead.keep_tokens()
        drafter = self._eager if self._graphs is None else self._graphs
        pages = self._page_ids(batch.reqs[0], state.next_position + 1)
        logits = drafter.read_prompt_end(batch, state, pages)
        self.chooser.draft(state, logits, mask=None)
        agree_on_drafts(self.ranks, [state])
        self._note_draft(batch.reqs[0], state)

    def _hold_up(self) -> None:
        """Something else comes before the end of a round that was begun ahead, and waits for it as
        far as that has been enqueued."""
        self._side.join()
        if self._ahead is not None:
            self._ahead.is_held_up = True
            self._take_plan_back()

    def _take_plan_back(self) -> None:
        """Of a round that was begun ahead, which does not take place as planned."""
        if self._ahead is not None and self._ahead.plan is not None:
            self.stepper.take_back()
            self._ahead.plan = None

    # Beginning a round

    def _begin_round(
        self,
        batch: Any,
        states: list[RequestState],
        pages: list[torch.Tensor],
        late: frozenset[int],
    ) -> StartedRound:
        """The round that was begun ahead, as far as it is of this batch, or one that begins now.
        The main stream follows its steps. pages, late: as _start() takes them."""
        started = None if self._ahead is None else self._ahead.for_batch(states)
        if started is None:
            lens, budget = self._lengths.plan(states, late)
            started = self._start(batch, states, pages, lens, late, budget)
        elif self.kv.plan.host_pages and (started.plan is None or started.is_idle):
            # The device drafts already, which leaves the CPU time to choose who verifies.
            assert self._next_budget is not None
            self._take_plan_back()
            started.plan = self.stepper.plan(states, pages, started.lens, self._next_budget, late)
        elif started.plan is not None:
            self.stepper.fetch_ahead(started.plan)
        self._ahead = None
        self._side.join()
        # Of a round that was begun ahead, what was late then may be here.
        started.late = late
        return started

    def _begin_ahead(
        self,
        batch: Any,
        states: list[RequestState],
        pages: list[torch.Tensor],
        late: frozenset[int],
    ) -> None:
        """The next round, if it has not begun and may, as _plan_next() has said.

        The CPU has full pages encoded once the device drafts, which reads them in the window: what
        encodes them writes nothing that those drafts read, and whoever gets their places in the
        window is behind the drafts.
        """
        if self._ahead is not None or not self._can_begin_ahead(batch, states):
            return
        caps = [state.cap_len(self.config.max_draft_len) for state in states]
        rooms = [cap - len(state.drafts) for state, cap in zip(states, caps, strict=True)]
        lens = [min(pair) for pair in zip(self._next_lens, rooms, strict=True)]
        starts = [(state.next_position, n) for state, n in zip(states, lens, strict=True)]
        if not any(lens) or not drafts_fit(self.kv, starts):
            # What is not a draft is to see them as they are encoded; and who leaves makes room.
            self.pages.flush()
        self._ahead = self._start(batch, states, pages, lens, late)
        self.pages.flush()
        if self.kv.plan.host_pages and not late and self.decoding is None:
            # What it verifies comes while SGLang sends this round's tokens.
            assert self._next_budget is not None
            self._ahead.plan = self.stepper.plan_ahead(states, pages, lens, self._next_budget)

    def _can_begin_ahead(self, batch: Any, states: list[RequestState]) -> bool:
        return (
            self._graphs is not None
            and not batch.return_logprob
            and any(state.remaining > 0 for state in states)
            and all(takes_argmax(req, state) for req, state in self._zip(batch, states))
        )

    def _start(
        self,
        batch: Any,
        states: list[RequestState],
        pages: list[torch.Tensor],
        lens: list[int],
        late: frozenset[int],
        budget: RoundBudget | None = None,
    ) -> StartedRound:
        """Tell the device what to do next.

        pages: as _page_table gives them. lens: drafts that each request adds to those it has; where
        nobody drafts, a GPU that holds all residuals takes tokens without. late: requests that
        cannot do that, as residuals of theirs are still on the network. budget: what the link moves
        meanwhile, needed where residuals move.
        """
        timer = PhaseTimer(self.kv.device)
        started = StartedRound(list(states), lens, timer, num_steps=max(lens), late=late)
        if budget is not None and self.kv.plan.host_pages:
            started.plan = self.stepper.plan(states, pages, lens, budget, late)
        ready = [state for i, state in enumerate(states) if i not in late]
        # One that has nothing left to take is about to leave.
        advances = any(state.remaining > 0 for state in ready)
        if self._may_lack:
            lacking = (i for i, state in enumerate(states) if self._is_lacking(state))
            started.lacking = frozenset(lacking)
        started.begun_at = time.perf_counter()
        if self._over_at is not None and not self._holds_all:
            started.between_s = started.begun_at - self._over_at
        with self._side:
            timer.start()
            if any(lens):
                drafter = self._eager if self._graphs is None else self._graphs
                started.made = drafter.draft(batch, states, pages, lens)
            elif (
                self._holds_all
                and advances
                and not any(state.drafts or state.tail for state in ready)
            ):
                assert self._graphs is not None
                # Others than these wait for their tokens' log-probabilities or choice.
                at_once = not batch.return_logprob and all(
                    takes_argmax(req, state) for req, state in self._zip(batch, states)
                )
                steps = self._plain_steps if at_once else 1
                started.is_plain = True
                started.made, logits = self._graphs.advance(states, pages, steps, late)
                started.num_steps = len(started.made.tokens)
                started.logits = None if at_once else logits
            timer.mark()
        return started

    @property
    def _plain_steps(self) -> int:
        """Steps without drafts of a round, at most: SGLang reserves slots for so many."""
        return min(PLAIN_STEPS, self.speculative_num_draft_tokens)

    def _go_on(
        self, batch: Any, states: list[RequestState], started: StartedRound
    ) -> StartedRound | None:
        """Begin another plain round before the tokens of this one are read, so that the device does
        not wait for the CPU to do so; None where the CPU has a say in it."""
        if any(self._next_lens) or not self._can_begin_ahead(batch, states):
            return None
        steps = started.steps_on(self.kv.geometry.page_size, self._plain_steps)
        if steps < LEAST_STEPS_ON:
            return None
        assert self._graphs is not None
        assert started.made is not None
        more = StartedRound(
            list(states),
            [0] * len(states),
            PhaseTimer(self.kv.device),
            begun_at=time.perf_counter(),
            num_steps=steps,
            is_plain=True,
        )
        with self._side:
            more.timer.start()
            more.made = self._graphs.advance_on(started.made, steps)
            more.timer.mark()
        return more

    def _plan_next(
        self,
        states: list[RequestState],
        late: frozenset[int],
        num_drafts: Sequence[int] | None = None,
    ) -> None:
        """Before the CPU waits for the device, which is not to wait for this. num_drafts: those
        that requests will have then."""
        if self._graphs is not None:
            self._next_lens, self._next_budget = self._lengths.plan(states, late, num_drafts)

    def _page_table(
        self, batch: Any, states: list[RequestState], num_ahead: int
    ) -> list[torch.Tensor]:
        """Page ids on the CPU of every request's verified tokens and num_ahead more, in one
        transfer."""
        size = self.kv.geometry.page_size
        counts = [state.committed_len + num_ahead for state in states]
        slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices, : max(counts) : size]
        pages = slots.cpu().to(torch.int64) // size
        return [row[: -(-count // size)] for row, count in zip(pages, counts, strict=True)]

    # Control plane

    def weights_will_change(self) -> None:
        """What was begun with the old weights is done again."""
        super().weights_will_change()
        self._side.join()
        self._take_plan_back()
        self._ahead = None
