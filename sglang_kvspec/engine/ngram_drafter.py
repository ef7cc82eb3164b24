"""Drafter with several drafts a forward, where n-grams propose what the model would draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import ModelForward
from sglang_kvspec.kv.forward_plan import Row
from sglang_kvspec.planning.proposals import Proposal, RequestNgrams, SharedNgrams
from sglang_kvspec.runtime.draft_counts import DraftCounts
from sglang_kvspec.runtime.draft_view import DraftView, draft_forward_row
from sglang_kvspec.runtime.grammar import mask_after
from sglang_kvspec.runtime.ranks import Ranks, broadcast_runs
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.spec_sampler import SpecSampler


class NgramDrafter:
    """Drafter in which the model judges proposals over anchors.

    A draft step runs a request's last token and w proposed tokens, and reads its anchors once. At
    each position the model draws a draft as without proposals. Drafts behind it count as long as it
    equals the token that was proposed there. So w does not change which drafts are made, nor the
    distribution that each is drawn from: it only changes how many forwards they take.
    """

    def __init__(
        self,
        forward: ModelForward,
        sampler: SpecSampler,
        ranks: Ranks,
        page_size: int,
        counts: DraftCounts,
        view: DraftView | None = None,
        shared: SharedNgrams | None = None,
    ) -> None:
        """counts: of all requests. view: selects the pages that drafts read, None for all pages.
        shared: recent outputs of all requests, None where a request's own text is all there is."""
        self._forward, self._sampler, self._ranks = forward, sampler, ranks
        self._page_size, self._counts, self._view = page_size, counts, view
        self._shared = shared

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Append lens[i] drafts to the state of request i."""
        states = batch.states
        goals = [len(state.drafts) + more for state, more in zip(states, lens, strict=True)]
        for state, more in zip(states, lens, strict=True):
            if more:
                self._ngrams_of(state).follow(state.prompt, state.output)
        while missing := {
            i: goal - len(state.drafts)
            for i, (state, goal) in enumerate(zip(states, goals, strict=True))
            if goal > len(state.drafts)
        }:
            proposals = {i: self._propose(states[i], most - 1) for i, most in missing.items()}
            rows = {i: self._row(batch, i, each.tokens) for i, each in proposals.items()}
            before = {i: len(states[i].drafts) for i in rows}
            self._take(batch, rows, self._forward.run(batch, rows))
            broadcast_runs(
                self._ranks,
                [states[i] for i in rows],
                list(before.values()),
                [row.length for row in rows.values()],
            )
            for i, proposal in proposals.items():
                self._observe(states[i], proposal, len(states[i].drafts) - before[i] - 1)

    def _ngrams_of(self, state: RequestState) -> RequestNgrams:
        if state.ngrams is None:
            state.ngrams = RequestNgrams(self._shared)
        return state.ngrams

    def _propose(self, state: RequestState, most: int) -> Proposal:
        """Propose up to `most` tokens behind the request's last one."""
        if self._view is not None:
            # A view may read other pages for a token of the next page.
            most = min(most, self._page_size - 1 - state.next_position % self._page_size)
        return self._ngrams_of(state).propose(state.drafts, most)

    def _row(self, batch: RoundBatch, index: int, proposed: Sequence[int]) -> Row:
        state = batch.states[index]
        position, pages = state.next_position, batch.pages[index]
        return draft_forward_row(state, position, pages, self._page_size, self._view, proposed)

    def _take(self, batch: RoundBatch, rows: Mapping[int, Row], logits: torch.Tensor) -> None:
        """Append drafts by the logits [num_tokens, vocab] of all rows: those that equal the
        proposals, and one more."""
        top1 = logits.argmax(-1).tolist() if batch.is_greedy else None
        first = 0
        for i, row in rows.items():
            state = batch.states[i]
            for place, proposed in enumerate((*row.proposed, None), start=first):
                if top1 is not None:
                    state.drafts.append(top1[place])
                else:
                    one = logits[place : place + 1]
                    self._sampler.draft(state, one, mask_after(state.grammar, state.drafts, one))
                if state.drafts[-1] != proposed:
                    break
            first += row.length

    def _observe(self, state: RequestState, proposal: Proposal, num_kept: int) -> None:
        self._ngrams_of(state).observe(proposal, num_kept)
        for counts in (self._counts, state.draft_counts):
            counts.observe_step(len(proposal.tokens), num_kept)
