"""Draft steps in which the model judges tokens that n-grams propose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import WideLogits, WideSteps
from sglang_kvspec.planning.proposals import Proposal, RequestNgrams, SharedNgrams
from sglang_kvspec.runtime.draft_counts import DraftCounts
from sglang_kvspec.runtime.grammar import mask_after
from sglang_kvspec.runtime.ranks import Ranks, broadcast_runs
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.spec_sampler import SpecSampler


class ProposedSteps:
    """Draft steps with proposals, and what each request learns from them.

    A step runs a request's last token and w proposed tokens, and reads its anchors once. At each
    position the model draws a draft as without proposals. Drafts behind it count as long as it
    equals the token that was proposed there. So w does not change which drafts are made, nor the
    distribution that each is drawn from: it only changes how many forwards they take.
    """

    def __init__(
        self,
        steps: WideSteps,
        sampler: SpecSampler,
        ranks: Ranks,
        counts: DraftCounts,
        shared: SharedNgrams | None = None,
    ) -> None:
        """counts: of all requests. shared: recent outputs of all requests, None where a request's
        own text is all there is."""
        self._steps, self._sampler, self._ranks = steps, sampler, ranks
        self._counts, self._shared = counts, shared

    def follow(self, state: RequestState) -> RequestNgrams:
        """Return the n-grams of a request, up to its newest token."""
        if state.ngrams is None:
            state.ngrams = RequestNgrams(self._shared)
        state.ngrams.follow(state.prompt, state.output)
        return state.ngrams

    def most_proposed(self, state: RequestState, num_requests: int) -> int:
        """Return the most tokens of a proposal, see WideSteps.most_proposed."""
        return self._steps.most_proposed(state, num_requests)

    def begin(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Prepare steps that make lens[i] drafts for request i, see WideSteps.begin."""
        self._steps.begin(batch, lens)

    def take(self, batch: RoundBatch, proposals: Mapping[int, Proposal]) -> None:
        """Take a step with these proposals: append its drafts to the states, and learn from it."""
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
            num_kept = len(states[i].drafts) - before[i] - 1
            ngrams = states[i].ngrams
            assert ngrams is not None
            ngrams.observe(proposal, num_kept)
            for counts in (self._counts, states[i].draft_counts):
                counts.observe_step(len(proposal.tokens), num_kept)

    def note_times(self, name: str, times_ms: dict[str, float]) -> None:
        """Note the expected times of steps, for operators. name: of the kind of batch."""
        self._counts.step_ms[name] = times_ms

    def observe_ordinary(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Count lens[i] steps of request i without proposals."""
        for state, steps in zip(batch.states, lens, strict=True):
            for counts in (self._counts, state.draft_counts):
                counts.observe_ordinary(steps)

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
