"""The worker that drafts and verifies in rounds, for residuals that lie in the KV memory.

All requests draft at once, in steps that need no decision in between and that a GPU replays from
a graph without waiting for the CPU, and then verify at once. SGLang sees one iteration a round.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_kvspec.adapters.drafters import Drafter, EagerDrafter, GraphDrafter
from sglang_kvspec.adapters.requests import takes_argmax
from sglang_kvspec.adapters.worker import KVSpecWorker
from sglang_kvspec.core.config import AUTO_DRAFT_LEN
from sglang_kvspec.planning.rounds import RoundClock, RoundRequest, plan_round
from sglang_kvspec.pools.device_kv import DeviceKV
from sglang_kvspec.runtime.chooser import Verified
from sglang_kvspec.runtime.device_attention import DeviceAttention
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime.phase_timer import PhaseTimer
from sglang_kvspec.runtime.ranks import agree
from sglang_kvspec.runtime.request_state import RequestState

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
                runner,
                self.attention,
                self.kv,
                self.config.max_draft_len,
                self.chooser,
                self.ranks,
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

    def _iterate(self, batch: Any) -> GenerationBatchResult:
        states = batch.spec_info.states
        self._check_states(batch, states)
        lens = self._draft_lens(states)
        ends = [s.committed_len + n + 1 for s, n in zip(states, lens, strict=True)]
        pages = self._page_table(batch, ends)
        self._timer.start()
        drafted = self._drafter.draft(batch, states, pages, lens) if any(lens) else None
        self._timer.mark()
        rows = {
            i: Row(RowKind.VERIFY, state.committed_len, lens[i] + 1, pages[i])
            for i, state in enumerate(states)
        }
        # The CPU enqueues all this while the GPU drafts.
        result = self._forward(
            ForwardPlan(tuple(rows.values())),
            forward_batch=self._ragged_batch(batch, states, rows, drafted),
        )
        self._timer.mark()
        if drafted is not None:
            drafted.deliver(states)
        context = sum(state.committed_len for state in states) / len(states)
        verified = self._judge(batch, states, rows, result.logits_output.next_token_logits)
        self.pages.flush()
        self.clock.observe(lens, context, *self._timer.seconds())
        self._last_batch, self._last_context = len(states), context
        self.counters.iterations += 1
        return self._result(batch, states, verified, lens, result.logits_output)

    def _judge(
        self, batch: Any, states: list[RequestState], rows: dict[int, Row], logits: torch.Tensor
    ) -> list[Verified]:
        """Verify every request by its rows of logits [num_tokens, vocab] and commit."""
        likeliest: list[int] = []
        if any(takes_argmax(req, state) for req, state in self._zip(batch, states)):
            likeliest = logits.argmax(-1).tolist()
        chosen: list[Verified | None] = []
        first = 0
        for i, (req, state) in enumerate(self._zip(batch, states)):
            span = slice(first, first + rows[i].length)
            first = span.stop
            if takes_argmax(req, state):
                tokens = self.chooser.judge(state, likeliest[span])
                chosen.append(Verified(tokens, logits[span]))
            else:
                chosen.append(self._verify(req, state, logits[span]))
        return [
            self._commit(state, rows[i], choice)
            for i, (state, choice) in enumerate(
                zip(states, agree(self.ranks, states, chosen), strict=True)
            )
            if choice is not None
        ]

    def _draft_lens(self, states: list[RequestState]) -> list[int]:
        caps = [state.cap_len(self.config.max_draft_len) for state in states]
        if self.config.draft_len != AUTO_DRAFT_LEN:
            return caps
        if not self.clock.has_measured:
            lens = [min(FIRST_DRAFT_LEN, cap) for cap in caps]
        else:
            context = sum(state.committed_len for state in states) / len(states)
            requests = [
                RoundRequest(state.acceptance.probability, cap)
                for state, cap in zip(states, caps, strict=True)
            ]
            lens = plan_round(requests, self.clock.cost(context))
        # Ranks measure different times and must draft the same.
        return self.ranks.numbers(lens, about=[(s.rid, s.committed_len) for s in states])

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
            "verify_ms": self.clock.verify_s * 1e3,
        }
        return super().kvspec_report() | {"timing": timing}
