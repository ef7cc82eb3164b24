"""Verifications at the end of a round: forward, choice, and what requests take over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_kvspec.adapters.requests import takes_argmax
from sglang_kvspec.adapters.starting_worker import StartingWorker
from sglang_kvspec.adapters.verify_graphs import VerifyGraphs
from sglang_kvspec.pools.device_kv import DeviceKV
from sglang_kvspec.runtime.beside_rows import BesideDraft
from sglang_kvspec.runtime.chooser import Verified
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.forward_plan import ForwardPlan, Row, RowKind
from sglang_kvspec.runtime.ranks import agree
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.round_lengths import RoundLengths
from sglang_kvspec.runtime.sampling import num_finite


class VerifyingWorker(StartingWorker):
    """Verifies several requests in one forward, from a CUDA graph where there is one with room."""

    # Of a subclass that captures them.
    _verify_graphs: VerifyGraphs | None = None
    # Requests that may draft in the forward in which others verify, and which of them it pays for.
    _most_beside = 0
    _lengths: RoundLengths

    def _verify_rows(
        self,
        batch: Any,
        states: list[RequestState],
        rows: dict[int, Row],
        made: DraftedTokens | None,
        beside: dict[int, Row],
    ) -> tuple[LogitsProcessorOutput, DraftedTokens | None]:
        """Logits of every token of these rows, which the next round overwrites. beside: DRAFT rows
        of other requests, to draft in the same forward; their drafts come second, None where there
        are none or a GPU has no graph with room."""
        plan = ForwardPlan(tuple(rows.values()))
        if self._verify_graphs is not None:
            tokens, positions, firsts, _ = self._tokens_of(states, rows)
            drafts = [BesideDraft(i, states[i].last_token, row) for i, row in beside.items()]
            done = self._verify_graphs.run(plan, tokens, positions, made, firsts, drafts)
            if done is not None:
                drafted = done.drafted and replace(
                    done.drafted, tokens=self.ranks.tensor(done.drafted.tokens)
                )
                return LogitsProcessorOutput(next_token_logits=done.logits), drafted
        if isinstance(self.kv, DeviceKV):
            beside = {}
        self._from_graphs = False
        both = rows | beside
        forward_batch = self._ragged_batch(batch, states, both, made)
        output = self._forward(ForwardPlan(tuple(both.values())), forward_batch=forward_batch)
        logits_output = output.logits_output
        if not beside:
            return logits_output, None
        logits = logits_output.next_token_logits
        logits_output.next_token_logits = logits[: plan.num_tokens]
        chosen = self.ranks.tensor(logits[plan.num_tokens :].argmax(-1)[None])
        return logits_output, DraftedTokens.of_one_step(chosen, list(beside), len(states))

    def _rows_beside(
        self,
        batch: Any,
        states: list[RequestState],
        pages: list[torch.Tensor],
        num_drafts: list[int],
        verify: Sequence[int],
    ) -> dict[int, Row]:
        """Of requests that draft once more while others verify, which reads the weights for both:
        those with the fewest drafts, as many as there is room for."""
        ready = [
            i
            for i, (req, state) in enumerate(self._zip(batch, states))
            if i not in verify
            and takes_argmax(req, state)
            and self._lengths.pays(state, num_drafts[i])
        ]
        ready = sorted(ready, key=lambda i: num_drafts[i])[: self._most_beside]
        return {
            i: Row(RowKind.DRAFT, states[i].committed_len + num_drafts[i], 1, pages[i])
            for i in sorted(ready)
        }

    def _verify_row(self, state: RequestState, num_drafts: int, pages: torch.Tensor) -> Row:
        """Of all its tokens without verified KV, behind which it has so many drafts."""
        length = len(state.tail) + 1 + num_drafts
        num_pages = -(-(state.verified_len + length) // self.kv.geometry.page_size)
        return Row(RowKind.VERIFY, state.verified_len, length, pages[:num_pages])

    @staticmethod
    def _likeliest(
        batch: Any, states: list[RequestState], rows: dict[int, Row], logits: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return the top-1 token of every row of logits, and the bits of its logit as float64, both
        [num_tokens] int64 on the device, so that one transfer brings them; nothing where no
        request takes top-1 tokens."""
        if logits is None or not any(takes_argmax(batch.reqs[i], states[i]) for i in rows):
            return []
        largest, tokens = logits.max(-1)
        return [tokens, largest.double().view(torch.int64)]

    def _judge(
        self,
        batch: Any,
        states: list[RequestState],
        rows: dict[int, Row],
        logits: torch.Tensor | None,
        likeliest: Sequence[torch.Tensor],
    ) -> list[Verified | None]:
        """Verify the requests of `rows` by their logits [num_tokens, vocab] and commit. None for
        the others. likeliest: what _likeliest() says of these logits, on the CPU or not."""
        verified: list[Verified | None] = [None] * len(states)
        if logits is None:
            return verified
        targets: list[int] = []
        if likeliest:
            targets = likeliest[0].tolist()
            largest = likeliest[1].view(torch.float64)
        chosen: list[Verified | None] = []
        first = 0
        for i, row in rows.items():
            req, state = batch.reqs[i], states[i]
            # What follows a token of the tail is known.
            span = slice(first + len(state.tail), first + row.length)
            first = span.stop
            if takes_argmax(req, state):
                kept = logits[span] if batch.return_logprob else None
                num_sound = num_finite(largest[span])
                tokens = self.chooser.judge(state, targets[span], num_sound)
                chosen.append(Verified(tokens, kept))
            else:
                chosen.append(self._verify(req, state, logits[span]))
        agreed = agree(self.ranks, [states[i] for i in rows], chosen)
        for (i, row), choice in zip(rows.items(), agreed, strict=True):
            assert choice is not None
            verified[i] = self._commit(batch.reqs[i], states[i], row, choice)
        return verified
