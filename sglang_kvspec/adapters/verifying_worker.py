"""Verifications at the end of a round: forward, choice, and what requests take over."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_kvspec.adapters.requests import takes_argmax
from sglang_kvspec.adapters.verify_graphs import VerifyGraphs
from sglang_kvspec.adapters.worker import KVSpecWorker
from sglang_kvspec.runtime.chooser import Verified
from sglang_kvspec.runtime.draft_rows import DraftedTokens
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime.ranks import agree
from sglang_kvspec.runtime.request_state import RequestState


class VerifyingWorker(KVSpecWorker):
    """Verifies several requests in one forward, from a CUDA graph where there is one with room."""

    # Of a subclass that captures them.
    _verify_graphs: VerifyGraphs | None = None

    def _verify_rows(
        self,
        batch: Any,
        states: list[RequestState],
        rows: dict[int, Row],
        made: DraftedTokens | None,
    ) -> LogitsProcessorOutput:
        """Logits of every token of these rows, which the next round overwrites."""
        plan = ForwardPlan(tuple(rows.values()))
        if self._verify_graphs is not None:
            tokens, positions, firsts = self._tokens_of(states, rows)
            logits = self._verify_graphs.run(plan, tokens, positions, made, firsts)
            if logits is not None:
                return LogitsProcessorOutput(next_token_logits=logits)
        self._from_graphs = False
        forward_batch = self._ragged_batch(batch, states, rows, made)
        return self._forward(plan, forward_batch=forward_batch).logits_output

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
        chosen: list[Verified | None] = []
        first = 0
        for i, row in rows.items():
            req, state = batch.reqs[i], states[i]
            span = slice(first, first + row.length)
            first = span.stop
            if takes_argmax(req, state):
                kept = logits[span] if batch.return_logprob else None
                chosen.append(Verified(self.chooser.judge(state, likeliest[span]), kept))
            else:
                chosen.append(self._verify(req, state, logits[span]))
        agreed = agree(self.ranks, [states[i] for i in rows], chosen)
        for (i, row), choice in zip(rows.items(), agreed, strict=True):
            assert choice is not None
            verified[i] = self._commit(states[i], row, choice)
        return verified
