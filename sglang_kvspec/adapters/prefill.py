"""Prefills: one forward at the target precision, and the first token of each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_kvspec.adapters import hit_breakdown
from sglang_kvspec.adapters.assembly import WorkerParts
from sglang_kvspec.adapters.compat.batches import GenerationBatchResult, LogitsProcessorOutput
from sglang_kvspec.adapters.compat.request_kv import kv_of
from sglang_kvspec.adapters.first_tokens import first_tokens
from sglang_kvspec.adapters.logprobs import fill_logprobs
from sglang_kvspec.adapters.requests import early_state, new_state
from sglang_kvspec.adapters.spec_inputs import KVSpecDraftInput
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.loop import RoundLoop
from sglang_kvspec.engine.prompt_repeats import PromptRepeats
from sglang_kvspec.kv.forward_plan import ForwardPlan, Row, prefill_row


class Prefill:
    """The worker's part for extend batches: prefills, and requests that start on anchors."""

    def __init__(
        self, parts: WorkerParts, loop: RoundLoop, repeats: PromptRepeats | None = None
    ) -> None:
        """repeats: of prompts whose prefill is complete, where the scorer asks for them."""
        self._parts, self._loop, self._repeats = parts, loop, repeats

    def run(self, batch: Any) -> GenerationBatchResult:
        """Run one of SGLang's extend batches."""
        early = self._parts.arrivals.early
        if early is not None and early.has_pending_residuals(batch.reqs[0].rid):
            return self._start_on_anchors(batch)
        return self._compute(batch)

    def _compute(self, batch: Any) -> GenerationBatchResult:
        self._loop.interrupt()
        parts = self._parts
        rows = self._rows(batch)
        parts.pages.note_use(row.pages for row in rows)
        result = parts.forward.planned(ForwardPlan(tuple(rows)), batch=batch)
        for row in rows:
            parts.pages.commit(row.pages, row.start, row.end)
        self._count_hits(batch.reqs)
        logits = result.logits_output.next_token_logits
        firsts = first_tokens(batch.reqs, rows, logits, parts.sampler, parts.ranks)
        states = [
            new_state(req, row.end, 0 if first is None else first.tokens[0])
            for req, row, first in zip(batch.reqs, rows, firsts, strict=True)
        ]
        if batch.return_logprob:
            fill_logprobs(result.logits_output, batch, firsts, [s.params for s in states])
        complete = [i for i, first in enumerate(firsts) if first is not None]
        if self._repeats is not None:
            pages = [row.pages for row in rows]
            # Token ids tell nothing of prompts that came as embeddings.
            repeatable = [i for i in complete if states[i].remaining and _has_ids(batch.reqs[i])]
            if repeatable:
                # On a GPU, repeats read full pages from records only.
                parts.pages.flush()
            self._repeats.run(RoundBatch(states, pages, batch.reqs, batch), repeatable)
        self._loop.score((i, states[i], rows[i].pages) for i in complete)
        parts.pages.flush()
        if parts.disaggregation is not None:
            parts.disaggregation.note_prefill(batch.reqs)
        device = batch.seq_lens.device
        result.next_token_ids = torch.tensor([s.pending for s in states], device=device)
        result.accept_lens = torch.ones(len(rows), dtype=torch.int32, device=device)
        result.new_seq_lens = batch.seq_lens.clone()
        result.next_draft_input = KVSpecDraftInput(states)
        result.speculative_num_draft_tokens = parts.config.max_draft_len + 1
        return result

    def _rows(self, batch: Any) -> list[Row]:
        """Return the row of every request; fail requests whose cached prefix is corrupt."""
        parts = self._parts
        size = parts.kv.geometry.page_size
        rows = []
        for req, start, length in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            pages = parts.table.of_request(req, start + length)
            row = prefill_row(
                start, length, pages, page_size=size, recent_pages=parts.config.recent_pages
            )
            if parts.guard.fails(req, row.past_pages(size)):
                parts.guard.mark(pages[start // size :])
            rows.append(row)
        return rows

    def _count_hits(self, reqs: Sequence[Any]) -> None:
        """Count prefix hits of requests whose prompt is complete with this forward. Requests that
        were retracted are counted already."""
        counters = self._parts.counters
        for req in reqs:
            if req.inflight_middle_chunks == 0 and not req.retracted_stain:
                loaded = hit_breakdown.tokens_of(req)
                counters.observe_hits(
                    resident=req.cached_tokens_device,
                    host=req.cached_tokens_host,
                    disk=req.cached_tokens_storage - loaded.remote,
                    remote=loaded.remote,
                )
                counters.observe_kept_anchors(host=loaded.kept_host, disk=loaded.kept_disk)

    def _start_on_anchors(self, batch: Any) -> GenerationBatchResult:
        """Let the batch's only request start on anchors. No token is chosen before its first
        verification: to SGLang, the request looks like one whose prompt is not complete."""
        parts = self._parts
        (req,), (cached_len,) = batch.reqs, batch.prefix_lens
        self._count_hits([req])
        state = early_state(req, cached_len)
        pages = parts.table.of_request(req, state.next_position + 1)
        self._loop.start_on_anchors(RoundBatch([state], [pages], [req], batch))
        req.inflight_middle_chunks = 1
        kv_of(req).kv_committed_len = state.committed_len
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.tensor([state.pending]),
            accept_lens=torch.ones(1, dtype=torch.int32),
            new_seq_lens=torch.full_like(batch.seq_lens, state.committed_len),
            next_draft_input=KVSpecDraftInput([state]),
            speculative_num_draft_tokens=parts.config.max_draft_len + 1,
        )


def _has_ids(req: Any) -> bool:
    """Return False for a request some of whose embeddings do not follow from its token ids."""
    fields = ("input_embeds", "positional_embed_overrides")
    return all(getattr(req, field, None) is None for field in fields)
