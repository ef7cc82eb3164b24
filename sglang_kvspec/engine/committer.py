"""Commit of the tokens that verifications and plain steps emit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import Arrivals
from sglang_kvspec.engine.started_round import StartedRound
from sglang_kvspec.kv.forward_plan import Row, RowKind
from sglang_kvspec.runtime.draft_view import DraftReads
from sglang_kvspec.runtime.grammar import allowed_by, masks_along
from sglang_kvspec.runtime.metrics import SpecCounters
from sglang_kvspec.runtime.page_scorer import NoScores, PageScorer
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.ranks import Ranks, broadcast_tokens
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import num_finite
from sglang_kvspec.runtime.spec_sampler import SpecSampler, VerifyResult


class Committer:
    """Committer of tokens: judges drafts by target logits, updates states, pages and counters."""

    def __init__(
        self,
        sampler: SpecSampler,
        pages: PageKeeper,
        arrivals: Arrivals,
        ranks: Ranks,
        counters: SpecCounters,
        reads: DraftReads | None = None,
        scorer: PageScorer | None = None,
    ) -> None:
        """reads: tokens that drafts read; None for all. scorer: knows their attention mass."""
        self._sampler, self._pages, self._reads = sampler, pages, reads or DraftReads()
        self._scorer, self._selection_s = scorer or NoScores(), 0.0
        self._arrivals, self._ranks, self._counters = arrivals, ranks, counters

    @staticmethod
    def top1(
        batch: RoundBatch, rows: Mapping[int, Row], logits: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return the top-1 token of every row of logits, and the bits of its logit as float64. Both
        are [num_tokens] int64 on the device, so that one transfer brings them. Return nothing where
        no request is greedy."""
        if logits is None or not any(batch.states[i].is_greedy for i in rows):
            return []
        largest, tokens = logits.max(-1)
        return [tokens, largest.double().view(torch.int64)]

    def commit(
        self,
        batch: RoundBatch,
        rows: Mapping[int, Row],
        logits: torch.Tensor | None,
        top1: Sequence[torch.Tensor],
    ) -> list[VerifyResult | None]:
        """Commit what the requests of `rows` emit by their logits [num_tokens, vocab].

        top1: as from top1() of these logits, on the CPU or the device. Returns an entry for every
        request of the batch: None for a request without a row, no tokens for a request that cannot
        go on because its logits allow no choice.
        """
        emitted: list[VerifyResult | None] = [None] * len(batch.states)
        if logits is None:
            return emitted
        chosen = self._judge(batch, rows, logits, top1)
        selection_s = self._take_selection_time()
        results = broadcast_tokens(self._ranks, [batch.states[i] for i in rows], chosen)
        for (i, row), verified in zip(rows.items(), results, strict=True):
            assert verified is not None
            emitted[i] = verified
            if verified.tokens:
                self._take_over(batch.states[i], row, verified.tokens)
                batch.states[i].draft_counts.selection_s += selection_s
        return emitted

    def _take_selection_time(self) -> float:
        """Return the seconds of scores and selections since the last call, and count them."""
        before, self._selection_s = self._selection_s, self._scorer.selection_s
        self._counters.drafts.selection_s += self._selection_s - before
        return self._selection_s - before

    def _judge(
        self,
        batch: RoundBatch,
        rows: Mapping[int, Row],
        logits: torch.Tensor,
        top1: Sequence[torch.Tensor],
    ) -> list[VerifyResult | None]:
        """Return what each row emits, without committing it."""
        targets: list[int] = []
        if top1:
            targets = top1[0].tolist()
            largest = top1[1].view(torch.float64)
        chosen: list[VerifyResult | None] = []
        first = 0
        for i, row in rows.items():
            state = batch.states[i]
            # Skip the logits of the tail: the token after each of its tokens is known.
            span = slice(first + len(state.tail), first + row.length)
            first = span.stop
            if state.is_greedy:
                kept = logits[span] if batch.wants_logprobs else None
                num_sound = num_finite(largest[span])
                tokens = self._sampler.judge(state, targets[span], num_sound)
                chosen.append(VerifyResult(tokens, kept))
                continue
            masks = masks_along(state.grammar, state.drafts, logits[span])
            verified = self._sampler.verify(state, logits[span], allowed_by(masks))
            if masks is not None:
                verified = verified._replace(tokens=verified.tokens[: masks.max_tokens])
            chosen.append(verified)
        return chosen

    def _take_over(self, state: RequestState, row: Row, tokens: list[int]) -> None:
        num_drafts, num_accepted = len(state.drafts), len(tokens) - 1
        self._counters.observe_verification(num_drafts, num_accepted)
        context, read = state.committed_len, self._reads.tokens(state)
        mass = 1.0 if read == context else self._scorer.mass_read(state)
        for counts in (self._counters.drafts, state.draft_counts):
            counts.observe(num_drafts, num_accepted, state.budget, context, read, mass)
        before = state.verified_len
        self._arrivals.note_verification(state, len(tokens))
        state.commit(tokens)
        self._pages.commit(row.pages, before, state.committed_len)

    def commit_plain(self, batch: RoundBatch, started: StartedRound) -> list[VerifyResult | None]:
        """Commit the tokens of a plain round. A request that came meanwhile has none."""
        made, states = started.made, batch.states
        assert made is not None
        if started.logits is not None:
            rows = {
                i: Row(RowKind.VERIFY, states[i].committed_len, 1, batch.pages[i])
                for i in made.order
            }
            logits = started.logits[: len(made.order)]
            return self.commit(batch, rows, logits, self.top1(batch, rows, logits))
        emitted: list[VerifyResult | None] = [None] * len(states)
        for i, tokens in made.deliver().items():
            before = states[i].committed_len
            for _ in tokens if self._arrivals.come_with_requests else ():
                self._arrivals.note_verification(states[i], 1)
            states[i].commit(tokens)
            self._pages.commit(batch.pages[i], before, states[i].committed_len)
            self._counters.observe_plain(len(tokens))
            emitted[i] = VerifyResult(tokens, None)
        return emitted
