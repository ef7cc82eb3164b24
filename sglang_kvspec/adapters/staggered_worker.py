"""The worker that staggers: one ragged forward an iteration, some rows drafting, some verifying."""

from __future__ import annotations

import time
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_kvspec.adapters import loaded_hits
from sglang_kvspec.adapters.grammar import mask_after
from sglang_kvspec.adapters.requests import early_state
from sglang_kvspec.adapters.spec_inputs import KVSpecDraftInput
from sglang_kvspec.adapters.worker import KVSpecWorker
from sglang_kvspec.planning.step import StepPlan
from sglang_kvspec.runtime.chooser import Verified
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime.ranks import agree
from sglang_kvspec.runtime.remote_prefixes import EarlyStarts
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.stepper import Stepper

# How long an iteration in which nobody can go on waits for residuals; new requests of users wait as
# long.
_WAIT_S = 0.005


class StaggeredWorker(KVSpecWorker):
    """Residual traffic of one request hides behind the drafts of the others."""

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        self.stepper = Stepper(self.config, self.kv, self.ranks)

    @property
    def early(self) -> EarlyStarts | None:
        """Requests that start on anchors, where some may."""
        early: EarlyStarts | None = self._pool.early_starts
        return early

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        if self.early is not None and self.early.lacks_residuals(batch.reqs[0].rid):
            return self._start_on_anchors(batch)
        return super()._prefill(batch)

    def _start_on_anchors(self, batch: Any) -> GenerationBatchResult:
        """Of one request, alone: nothing is computed, and no token is chosen, before its first
        verification. SGLang takes it for one whose prompt is not complete."""
        (req,), (cached_len,) = batch.reqs, batch.prefix_lens
        self._count_hits([req])
        state = early_state(req, cached_len)
        req.inflight_middle_chunks = 1
        req.kv_committed_len = state.committed_len
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.tensor([state.pending]),
            accept_lens=torch.ones(1, dtype=torch.int32),
            new_seq_lens=torch.full_like(batch.seq_lens, state.committed_len),
            next_draft_input=KVSpecDraftInput([state]),
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
        )

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
                    verified[i] = self._commit(states[i], rows[i], choice)
            # Copies lie before it here; on a machine with a link they would run beside it.
            self.stepper.speeds.note_iteration(time.perf_counter() - begun)
        elif self.decoding is not None:
            self.decoding.wait()
        elif self.early is not None:
            self.early.wait_for_news(_WAIT_S)
        self.counters.observe_step(plan)
        return self._result(batch, states, verified, cap_lens, logits_output)

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

    def _note_draft(self, req: Any, state: RequestState) -> None:
        if self.decoding is not None:
            self.decoding.note_drafts(state, on_anchors=self.decoding.is_lacking(state))
        if self.early is not None and self.early.lacks_residuals(state.rid):
            self.early.note_draft()
            loaded_hits.note_draft(req)
