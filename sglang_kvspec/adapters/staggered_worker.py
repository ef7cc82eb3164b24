"""The worker that staggers: one ragged forward an iteration, some rows drafting, some verifying."""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_kvspec.adapters.grammar import mask_after
from sglang_kvspec.adapters.starting_worker import StartingWorker
from sglang_kvspec.planning.step import StepPlan
from sglang_kvspec.runtime.chooser import Verified
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime.ranks import agree
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.stepper import Stepper


class StaggeredWorker(StartingWorker):
    """Residual traffic of one request hides behind the drafts of the others."""

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        self.stepper = Stepper(self.config, self.kv, self.ranks)

    def _iterate(self, batch: Any) -> GenerationBatchResult:
        states = batch.spec_info.states
        self._check_states(batch, states)
        if self.decoding is not None:
            self.decoding.receive(batch.reqs)
        pages = [self._page_ids(req, s.committed_len) for req, s in self._zip(batch, states)]
        plan = self.stepper.plan(states, pages)
        begun = time.perf_counter()
        rows = self._rows(plan, batch, states)
        self.spoiled.drop(batch.reqs, rows)
        verified: list[Verified | None] = [None] * len(states)
        logits_output = LogitsProcessorOutput(next_token_logits=None)
        cap_lens = [0] * len(states)
        if rows:
            indices = list(rows)
            result = self._forward(
                ForwardPlan(tuple(rows.values())),
                forward_batch=self._ragged_batch(batch, states, rows),
            )
            logits_output = result.logits_output
            spans = logits_output.next_token_logits.split([r.length for r in rows.values()])
            chosen: list[Verified | None] = []
            for i, logits in zip(indices, spans, strict=True):
                if rows[i].kind is RowKind.DRAFT:
                    mask = mask_after(batch.reqs[i].grammar, states[i].drafts, logits[-1:])
                    self.chooser.draft(states[i], logits[-1:], mask)
                    self._note_draft(batch.reqs[i], states[i])
                    chosen.append(None)
                else:
                    cap_lens[i] = len(states[i].drafts)
                    # What follows a token of the tail is known.
                    judged = logits[len(states[i].tail) :]
                    chosen.append(self._verify(batch.reqs[i], states[i], judged))
            agreed = agree(self.ranks, [states[i] for i in indices], chosen)
            for i, choice in zip(indices, agreed, strict=True):
                if choice is not None:
                    verified[i] = self._commit(batch.reqs[i], states[i], rows[i], choice)
            # Copies lie before it here; on a machine with a link they would run beside it.
            self.stepper.speeds.note_iteration(time.perf_counter() - begun)
        elif self._may_lack:
            self._await_residuals()
        self.counters.observe_step(plan)
        return self._result(batch, states, verified, cap_lens, logits_output)

    def _expected_s(self, states: list[RequestState], lengths: list[int]) -> dict[int, float]:
        return {i: self.stepper.cycle_s(states[i]) for i, n in enumerate(lengths) if n > 1}

    def _rows(self, plan: StepPlan, batch: Any, states: list[RequestState]) -> dict[int, Row]:
        """Row of every request that takes part in this forward, in batch order."""
        rows: dict[int, Row] = {}
        for i, (req, state) in enumerate(self._zip(batch, states)):
            if i in plan.wait:
                continue
            kind = RowKind.DRAFT if i in plan.draft else RowKind.VERIFY
            tokens = state.undrafted if i in plan.draft else state.unverified
            end = state.next_position + 1
            ids = self._page_ids(req, end)
            rows[i] = Row(kind, end - len(tokens), len(tokens), ids)
        return rows
