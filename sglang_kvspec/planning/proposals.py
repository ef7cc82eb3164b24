"""Proposals of one request's next drafts, from n-grams of its own text or of recent outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sglang_kvspec.planning.draft_length import AcceptanceEstimate, expected_tokens
from sglang_kvspec.planning.ngram_index import LONGEST, SEPARATOR, NgramIndex

# Most tokens that are proposed to one draft step.
MOST_PROPOSED = 16
# Cost of one more token in a draft step, relative to a step of one token: on a CPU 0.05 for a model
# of 5M parameters and 0.11 for one of 31M (docs/benchmarks/log.md).
ROW_COST = 0.1
# Kept and rejected proposals that a request is assumed to have had, for each length of a match.
PRIOR = (1.0, 1.0)
# Tokens of outputs that all requests share.
MOST_SHARED = 131_072
# New tokens of an output that are shared at once.
SHARED_CHUNK = 16


def proposal_len(probability: float, most: int) -> int:
    """Return the number of proposals, 0 to `most`, with the most expected drafts per cost.

    probability: that a proposal is kept if those before it are. 0 is an ordinary draft step.
    """

    def rate(num_proposed: int) -> float:
        return expected_tokens(probability, num_proposed) / (1 + ROW_COST * num_proposed)

    return max(range(most + 1), key=rate)


def num_equal(proposed: Sequence[int], made: Sequence[int]) -> int:
    """Return how many of the first proposed tokens equal those that were made."""
    pairs = enumerate(zip(proposed, made, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(proposed), len(made)))


class SharedNgrams:
    """Recent outputs of a server, of all its requests."""

    def __init__(self, most_tokens: int = MOST_SHARED) -> None:
        self.index = NgramIndex(most_tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Add consecutive tokens of one output."""
        self.index.extend((*tokens, SEPARATOR))


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a request's drafts. source: of the match that they come from, which
    estimates of success are kept by: True if recent outputs had it, and its length. None where
    nothing matched. probability: that a token becomes a draft if those before it do."""

    tokens: list[int] = field(default_factory=list)
    source: tuple[bool, int] | None = None
    probability: float = 0.0

    def first(self, count: int) -> Proposal:
        """Return the proposal of the first `count` tokens."""
        return replace(self, tokens=self.tokens[:count])


class _Trial(NamedTuple):
    """Proposal that no step took. start: tokens of output and drafts that it follows."""

    proposal: Proposal
    start: int


class RequestNgrams:
    """N-grams of a request's prompt and output, and how many proposals from them were kept."""

    def __init__(self, shared: SharedNgrams | None = None) -> None:
        """shared: recent outputs of all requests, None to propose this request's text only."""
        self._index, self._shared, self._num_shared = NgramIndex(), shared, 0
        self._estimates: dict[tuple[bool, int], AcceptanceEstimate] = {}
        self._trial: _Trial | None = None

    def follow(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Add the tokens that are new since the last call. Both texts only grow at their ends. The
        cost is that of the new tokens."""
        behind = self._index.num_added - len(prompt)
        if behind < 0:
            self._index.extend(prompt[behind:])
            behind = 0
        self._index.extend(output[behind:])
        if self._shared is not None and len(output) - self._num_shared >= SHARED_CHUNK:
            # Overlap, so that n-grams across the chunks are not lost.
            self._shared.add(output[max(0, self._num_shared - LONGEST) :])
            self._num_shared = len(output)

    def look_up(self, drafts: Sequence[int], most: int = MOST_PROPOSED) -> Proposal:
        """Return up to `most` tokens that may follow the text and these drafts. The longer of a
        match in the request's own text and one in recent outputs wins, and its own if both are as
        long."""
        newest = self._index.newest(drafts)
        match, index, behind = self._index.find(newest), self._index, drafts
        if self._shared is not None:
            other = self._shared.index.find(newest)
            if other is not None and (match is None or other.length > match.length):
                match, index, behind = other, self._shared.index, ()
        if match is None:
            return Proposal()
        source = (index is not self._index, match.length)
        tokens = index.following(match, behind, min(most, MOST_PROPOSED))
        return Proposal(tokens, source, self._estimate(source).probability)

    def propose(self, drafts: Sequence[int], most: int) -> Proposal:
        """Propose as many of up to `most` tokens as pay on a CPU."""
        found = self.look_up(drafts, most)
        return found.first(proposal_len(found.probability, len(found.tokens)))

    def begin_trial(self, proposal: Proposal, drafts: Sequence[int], num_output: int) -> None:
        """Note a proposal behind an output of num_output tokens and these drafts that no step
        takes, so that end_trial() can learn from it."""
        if proposal.tokens:
            self._trial = _Trial(proposal, num_output + len(drafts))

    def end_trial(self, output: Sequence[int], drafts: Sequence[int]) -> None:
        """Learn from the noted proposal by the tokens that came in its place. Proposals that cost
        too much to be tried are judged this way, without a step."""
        trial, self._trial = self._trial, None
        if trial is None:
            return
        behind = max(trial.start - len(output), 0)
        came = [*output[trial.start : trial.start + MOST_PROPOSED], *drafts[behind:]]
        tokens = trial.proposal.tokens[: len(came)]
        kept = num_equal(tokens, came)
        if tokens:
            self.observe(trial.proposal.first(len(tokens)), kept)

    def observe(self, proposal: Proposal, num_kept: int) -> None:
        """Learn from a draft step that kept the first num_kept proposals. A match from which
        nothing was proposed moves the estimate back to where it began, so that the request tries
        again."""
        if proposal.source is not None:
            self._estimate(proposal.source).observe(len(proposal.tokens), num_kept)

    def _estimate(self, source: tuple[bool, int]) -> AcceptanceEstimate:
        if source not in self._estimates:
            self._estimates[source] = AcceptanceEstimate(*PRIOR, prior=PRIOR)
        return self._estimates[source]
