"""Requests that start on anchors from a prefix server, as far as the worker has to do with it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_kvspec.adapters import loaded_hits
from sglang_kvspec.adapters.requests import early_state
from sglang_kvspec.adapters.spec_inputs import KVSpecDraftInput
from sglang_kvspec.adapters.transfer.decoding import NEWS_WAIT_S
from sglang_kvspec.adapters.worker import KVSpecWorker
from sglang_kvspec.runtime.remote_prefixes import EarlyStarts
from sglang_kvspec.runtime.request_state import RequestState


class StartingWorker(KVSpecWorker):
    """Takes over requests whose residuals are on their way, and knows which those are."""

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
        """Of one request, alone: no token is chosen before its first verification. SGLang takes it
        for one whose prompt is not complete."""
        (req,), (cached_len,) = batch.reqs, batch.prefix_lens
        self._count_hits([req])
        state = early_state(req, cached_len)
        self._begin_drafts(batch, state)
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

    def _begin_drafts(self, batch: Any, state: RequestState) -> None:
        """What a request that starts on anchors has to do before others draft with it. batch: of
        SGLang, of this request alone, which stays as it is."""

    @property
    def _may_lack(self) -> bool:
        """Whether residuals of any request can be on the network."""
        return self.decoding is not None or self.early is not None

    def _is_lacking(self, state: RequestState) -> bool:
        """Whether residuals of a request are still on the network."""
        if self.decoding is not None:
            return self.decoding.is_lacking(state)
        return self.early is not None and self.early.lacks_residuals(state.rid)

    def _note_draft(self, req: Any, state: RequestState) -> None:
        """It was made just now."""
        is_lacking = self._is_lacking(state)
        if self.decoding is not None:
            self.decoding.note_drafts(state, on_anchors=is_lacking)
        elif is_lacking:
            self._note_early_drafts(req, 1)

    def _note_early_drafts(self, req: Any, count: int) -> None:
        """Of a request whose residuals were on their way from a prefix server."""
        assert self.early is not None
        self.early.note_drafts(count)
        loaded_hits.note_drafts(req, count)

    def _await_residuals(self) -> None:
        """In an iteration in which nobody can go on before some arrive."""
        if self.decoding is not None:
            self.decoding.wait()
            return
        assert self.early is not None, "only residuals on the network keep all from going on"
        self.early.wait_for_news(NEWS_WAIT_S)
