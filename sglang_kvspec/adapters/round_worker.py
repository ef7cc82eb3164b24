"""The worker that drafts and verifies in rounds.

All requests draft at once, in steps that need no decision in between and that a GPU replays from
a graph without waiting for the CPU, and then verify at once. Where not all residuals lie in the KV
memory some of them verify, and the others go on drafting in the next round. SGLang sees one
iteration a round.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_kvspec.adapters.drafters import Drafter, EagerDrafter, GraphDrafter
from sglang_kvspec.adapters.requests import takes_argmax
from sglang_kvspec.adapters.worker import KVSpecWorker
from sglang_kvspec.core.config import AUTO_DRAFT_LEN
from sglang_kvspec.planning.round_step import RoundBudget
from sglang_kvspec.planning.rounds import WEIGHT, RoundClock, RoundRequest, plan_round
from sglang_kvspec.pools.device_kv import DeviceKV
from sglang_kvspec.runtime.chooser import Verified
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.round_stepper import RoundStepper

# Drafts of the first round, before anything was measured.
FIRST_DRAFT_LEN = 8
# A guess for the CPU, where no graph is timed at the start.
CPU_STEP_S = 1e-3


class RoundWorker(KVSpecWorker):
    """draft_len auto: each round's lengths are those with the most expected tokens a second, by
    every request's acceptance so far and by what rounds took."""

    def init_cuda_graphs(self) -> None:
        """Make the drafter; on a GPU this captures the graphs of a draft step."""
        runner = self._target_worker.model_runner
        step_s = CPU_STEP_S
        self._drafter: Drafter
        if isinstance(self.attention, DeviceAttention):
            self.attention.warm_up(self.config.max_draft_len)
        if isinstance(self.kv, DeviceKV) and self.config.drafts:
            drafter = GraphDrafter(
                runner, self.attention, self.kv, self.config.max_draft_len, self.chooser
            )
            step_s = drafter.empty_step_s
            self._drafter = drafter
        else:
            self._drafter = EagerDrafter(self)
        page = self.kv.plan.page_bytes
        both = page.residual if self.config.target == "exact" else page.anchor + page.residual
        self.clock = RoundClock(step_s, both / page.anchor)
        self._timer = PhaseTimer(self.kv.device)
        self._last_batch, self._last_context = 0, 0.0
        self._fetch_wait_s = 0.0

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        self.stepper = RoundStepper(self.kv)

    def _iterate(self, batch: Any) -> GenerationBatchResult:
        states = batch.spec_info.states
        self._check_states(batch, states)
        caps = [state.cap_len(self.config.max_draft_len) for state in states]
        pages = self._page_table(
            batch, [s.committed_len + cap + 1 for s, cap in zip(states, caps, strict=True)]
        )
        context = sum(state.committed_len for state in states) / len(states)
        lens, budget = self._draft_lens(states, caps, context)
        plan = self.stepper.plan(states, pages, lens, budget)
        num_drafts = [len(state.drafts) + n for state, n in zip(states, lens, strict=True)]
        self._timer.start()
        drafted = self._drafter.draft(batch, states, pages, lens) if any(lens) else None
        self._timer.mark()
        self.stepper.await_fetches(plan, pages)
        self._timer.mark()
        rows = {
            i: self._verify_row(states[i].committed_len, num_drafts[i] + 1, pages[i])
            for i in plan.verify
        }
        logits_output = LogitsProcessorOutput(next_token_logits=None)
        if rows:
            # The CPU enqueues all this while the GPU drafts.
            result = self._forward(
                ForwardPlan(tuple(rows.values())),
                forward_batch=self._ragged_batch(batch, states, rows, drafted),
            )
            logits_output = result.logits_output
        self._timer.mark()
        if drafted is not None:
            drafted.deliver(states)
        verified = self._judge(batch, states, rows, logits_output.next_token_logits)
        self.pages.flush()
        self._observe(lens, context, {i: num_drafts[i] for i in rows})
        cap_lens = [n if i in rows else 0 for i, n in enumerate(num_drafts)]
        return self._result(batch, states, verified, cap_lens, logits_output)

    def _observe(self, lens: list[int], context: float, verified_lens: dict[int, int]) -> None:
        """Learn from a round in which request i added lens[i] drafts and those of verified_lens
        verified so many."""
        draft_s, wait_s, verify_s = self._timer.seconds()
        self._fetch_wait_s += WEIGHT * (wait_s - self._fetch_wait_s)
        self.clock.observe(lens, context, draft_s, verify_s, list(verified_lens.values()))
        self._last_batch, self._last_context = len(lens), context
        self.counters.iterations += 1
        self.counters.waits += sum(n == 0 and i not in verified_lens for i, n in enumerate(lens))

    def _verify_row(self, start: int, length: int, pages: torch.Tensor) -> Row:
        num_pages = -(-(start + length) // self.kv.geometry.page_size)
        return Row(RowKind.VERIFY, start, length, pages[:num_pages])

    def _judge(
        self,
        batch: Any,
        states: list[RequestState],
        rows: dict[int, Row],
        logits: torch.Tensor | None,
    ) -> list[Verified | None]:
        """Verify the requests of `rows` by their logits [num_tokens, vocab] and commit. None for
        the others."""
        verified: list[Verified | None] = [None] * len(states)
        if logits is None:
            return verified
        likeliest: list[int] = []
        if any(takes_argmax(batch.reqs[i], states[i]) for i in rows):
            likeliest = logits.argmax(-1).tolist()
        first = 0
        for i, row in rows.items():
            req, state = batch.reqs[i], states[i]
            span = slice(first, first + row.length)
            first = span.stop
            if takes_argmax(req, state):
                tokens = self.chooser.judge(state, likeliest[span])
                verified[i] = self._commit(state, row, Verified(tokens, logits[span]))
            else:
                verified[i] = self._verify(req, state, row, logits[span])
        return verified

    def _draft_lens(
        self, states: list[RequestState], caps: list[int], context: float
    ) -> tuple[list[int], RoundBudget]:
        """Drafts that each request adds to those it has, and what the link moves meanwhile."""
        rooms = [cap - len(state.drafts) for state, cap in zip(states, caps, strict=True)]
        cost = self.clock.cost(context)
        if self.config.draft_len != AUTO_DRAFT_LEN:
            lens = rooms
        elif not self.clock.has_measured:
            lens = [min(FIRST_DRAFT_LEN, room) for room in rooms]
        else:
            requests = [
                RoundRequest(state.acceptance.probability, cap, len(state.drafts))
                for state, cap in zip(states, caps, strict=True)
            ]
            lens = plan_round(requests, cost)
        decided = lens, self.stepper.budget(lens, cost)
        # Ranks measure different times and must do the same.
        group = self._target_worker.model_runner.tp_group
        return decided if group.world_size == 1 else group.broadcast_object(decided, src=0)

    def _page_table(self, batch: Any, num_tokens: list[int]) -> list[torch.Tensor]:
        """Page ids on the CPU of every request's first num_tokens tokens, in one transfer."""
        size = self.kv.geometry.page_size
        slots = self.req_to_token_pool.req_to_token[
            batch.req_pool_indices, : max(num_tokens) : size
        ]
        pages = slots.cpu().to(torch.int64) // size
        return [row[: -(-count // size)] for row, count in zip(pages, num_tokens, strict=True)]

    def kvspec_report(self) -> dict[str, Any]:
        cost = self.clock.cost(self._last_context)
        timing = {
            # Of a step in which all requests of the last round take part, as fitted to all rounds.
            "draft_iter_ms": (cost.step + cost.row * self._last_batch) * 1e3,
            # What verifications waited for residuals, after the drafts.
            "fetch_wait_ms": self._fetch_wait_s * 1e3,
            "verify_ms": self.clock.verify_s * 1e3,
        }
        return super().kvspec_report() | {"timing": timing}
