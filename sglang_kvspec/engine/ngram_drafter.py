"""Drafter with several drafts a forward, where n-grams propose what the model would draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import Drafter, WideLogits, WideSteps
from sglang_kvspec.planning.proposals import (
    WAITED_STEP,
    Proposal,
    RequestNgrams,
    SharedNgrams,
    saves_time,
)
from sglang_kvspec.runtime.draft_counts import DraftCounts
from sglang_kvspec.runtime.drafted_tokens import DraftedTokens
from sglang_kvspec.runtime.grammar import mask_after
from sglang_kvspec.runtime.ranks import Ranks, broadcast_runs
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.spec_sampler import SpecSampler

# Ordinary steps at once, where proposals save no time in the middle of a round. Their tokens may be
# the start of text that comes again.
ORDINARY_STEPS = 4


class NgramDrafter:
    """Drafter in which the model judges proposals over anchors.

    A draft step runs a request's last token and w proposed tokens, and reads its anchors once. At
    each position the model draws a draft as without proposals. Drafts behind it count as long as it
    equals the token that was proposed there. So w does not change which drafts are made, nor the
    distribution that each is drawn from: it only changes how many forwards they take.

    A GPU makes drafts without proposals in steps that the CPU does not wait for. A round in which
    proposals are not expected to save time takes only such ordinary steps.
    """

    def __init__(
        self,
        steps: WideSteps,
        sampler: SpecSampler,
        ranks: Ranks,
        counts: DraftCounts,
        shared: SharedNgrams | None = None,
        ordinary: Drafter | None = None,
    ) -> None:
        """counts: of all requests. shared: recent outputs of all requests, None where a request's
        own text is all there is. ordinary: drafts one token a step; None where `steps` take no
        longer."""
        self._steps, self._sampler, self._ranks = steps, sampler, ranks
        self._counts, self._shared, self._ordinary = counts, shared, ordinary

    def draft(self, batch: RoundBatch, lens: Sequence[int]) -> DraftedTokens | None:
        """Make lens[i] drafts for request i. Append them to its state, or return them if only the
        device knows them."""
        states = batch.states
        goals = [len(state.drafts) + more for state, more in zip(states, lens, strict=True)]
        for state, more in zip(states, lens, strict=True):
            if more:
                self._ngrams_of(state).follow(state.prompt, state.output)
        # Requests that `steps` were begun for, 0 where they must be begun.
        num_begun, is_start = 0, True
        while missing := {
            i: goal - len(state.drafts)
            for i, (state, goal) in enumerate(zip(states, goals, strict=True))
            if goal > len(state.drafts)
        }:
            proposals = {
                i: self._propose(states[i], most - 1, num_begun or len(missing))
                for i, most in missing.items()
            }
            if self._ordinary is not None and not _save_time(batch, missing, proposals):
                most = max(missing.values()) if is_start else ORDINARY_STEPS
                made = self._take_ordinary(self._ordinary, batch, missing, proposals, most)
                if is_start:
                    return made
                _deliver(batch, made)
                num_begun = 0
                continue
            if not num_begun:
                self._steps.begin(batch, [missing.get(i, 0) for i in range(len(states))])
                num_begun = len(missing)
            self._take_proposed(batch, proposals)
            is_start = False
        return None

    def _ngrams_of(self, state: RequestState) -> RequestNgrams:
        if state.ngrams is None:
            state.ngrams = RequestNgrams(self._shared)
        return state.ngrams

    def _propose(self, state: RequestState, most: int, num_requests: int) -> Proposal:
        """Propose up to `most` tokens behind the request's last one."""
        most = min(most, self._steps.most_proposed(state, num_requests))
        return self._ngrams_of(state).propose(state.drafts, most)

    def _take_ordinary(
        self,
        drafter: Drafter,
        batch: RoundBatch,
        missing: Mapping[int, int],
        proposals: Mapping[int, Proposal],
        most: int,
    ) -> DraftedTokens | None:
        """Make up to `most` of the missing drafts of each request without proposals."""
        lens = [min(missing.get(i, 0), most) for i in range(len(batch.states))]
        for i, proposal in proposals.items():
            state = batch.states[i]
            for counts in (self._counts, state.draft_counts):
                counts.observe_ordinary(lens[i])
            if not proposal.tokens:
                self._ngrams_of(state).observe(proposal, 0)
        return drafter.draft(batch, lens)

    def _take_proposed(self, batch: RoundBatch, proposals: Mapping[int, Proposal]) -> None:
        """Take a step with these proposals, and learn from it."""
        states = batch.states
        proposed = {i: each.tokens for i, each in proposals.items()}
        before = {i: len(states[i].drafts) for i in proposed}
        self._draw(batch, proposed, self._steps.run(batch, proposed))
        broadcast_runs(
            self._ranks,
            [states[i] for i in proposed],
            list(before.values()),
            [1 + len(tokens) for tokens in proposed.values()],
        )
        for i, proposal in proposals.items():
            self._observe(states[i], proposal, len(states[i].drafts) - before[i] - 1)

    def _draw(
        self, batch: RoundBatch, proposed: Mapping[int, Sequence[int]], found: WideLogits
    ) -> None:
        """Append the drafts of a step: those that equal the proposals, and one more."""
        for i, tokens in proposed.items():
            state = batch.states[i]
            for place, token in enumerate((*tokens, None), start=found.firsts[i]):
                if state.is_greedy:
                    state.drafts.append(found.top1[place])
                else:
                    one = found.logits[place : place + 1]
                    self._sampler.draft(state, one, mask_after(state.grammar, state.drafts, one))
                if state.drafts[-1] != token:
                    break

    def _observe(self, state: RequestState, proposal: Proposal, num_kept: int) -> None:
        self._ngrams_of(state).observe(proposal, num_kept)
        for counts in (self._counts, state.draft_counts):
            counts.observe_step(len(proposal.tokens), num_kept)


def _save_time(
    batch: RoundBatch, missing: Mapping[int, int], proposals: Mapping[int, Proposal]
) -> bool:
    """Return True if steps with these proposals are expected to be quicker than ordinary ones."""
    # The CPU waits for each ordinary step of requests that are not greedy, too.
    cost = WAITED_STEP if batch.is_greedy else 1.0
    expected = [proposals[i].expected for i in missing]
    return saves_time(list(missing.values()), expected, cost)


def _deliver(batch: RoundBatch, made: DraftedTokens | None) -> None:
    """Append drafts that only the device knows to their states."""
    if made is not None:
        for i, tokens in made.deliver().items():
            batch.states[i].drafts.extend(tokens)
