"""Proposals of one request's next drafts, from n-grams of its own text or of recent outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_kvspec.planning.draft_length import AcceptanceEstimate, expected_tokens
from sglang_kvspec.planning.ngram_index import LONGEST, SEPARATOR, NgramIndex

# Most tokens that are proposed to one draft step.
MOST_PROPOSED = 16
# Cost of one more token in a draft step, relative to a step of one token: on a CPU 0.05 for a model
# of 5M parameters and 0.11 for one of 31M (docs/benchmarks/log.md).
ROW_COST = 0.1
# Cost of a draft step whose tokens the CPU reads before the next one, relative to a step that it
# does not wait for. An estimate: the device waits while the CPU reads, proposes and sends tokens.
WAITED_STEP = 1.3
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


def saves_time(lens: Sequence[int], expected: Sequence[float], cost: float) -> bool:
    """Return True if steps with proposals make drafts sooner than steps of one draft each. Requests
    draft together, so that the one with the most steps decides. lens: drafts to make. expected:
    drafts of a step with proposals. cost: of a step with proposals, relative to one without."""
    steps = max(n / gain for n, gain in zip(lens, expected, strict=True))
    return cost * steps < max(lens)


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
    nothing matched. expected: drafts of the step that the tokens are proposed to."""

    tokens: list[int] = field(default_factory=list)
    source: tuple[bool, int] | None = None
    expected: float = 1.0


class RequestNgrams:
    """N-grams of a request's prompt and output, and how many proposals from them were kept."""

    def __init__(self, shared: SharedNgrams | None = None) -> None:
        """shared: recent outputs of all requests, None to propose this request's text only."""
        self._index, self._shared, self._num_shared = NgramIndex(), shared, 0
        self._estimates: dict[tuple[bool, int], AcceptanceEstimate] = {}

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

    def propose(self, drafts: Sequence[int], most: int) -> Proposal:
        """Propose up to `most` tokens behind the text and these drafts. The longer of a match in
        the request's own text and one in recent outputs wins, and its own if both are as long."""
        newest = self._index.newest(drafts)
        match, index, behind = self._index.find(newest), self._index, drafts
        if self._shared is not None:
            other = self._shared.index.find(newest)
            if other is not None and (match is None or other.length > match.length):
                match, index, behind = other, self._shared.index, ()
        if match is None:
            return Proposal()
        source = (index is not self._index, match.length)
        probability = self._estimate(source).probability
        most = proposal_len(probability, min(most, MOST_PROPOSED))
        tokens = index.following(match, behind, most)
        return Proposal(tokens, source, expected_tokens(probability, len(tokens)))

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
